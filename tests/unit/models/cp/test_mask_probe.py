"""Models that change masks on their way to attention get tensors; all others may get masks in pieces."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.cp.mask_probe import passes_masks_through

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "config", "passes"),
    [
        ("llama", SIZES, True),
        ("gemma3_text", {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, True),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, False),  # adds ALiBi
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}, False),
    ],
)
def test_a_model_passes_masks_through_or_changes_them(model_type: str, config: dict[str, Any], passes: bool) -> None:
    skeleton = build_skeleton(build_config(ModelSpec(type=model_type, config=config), vocab_size=257))
    assert passes_masks_through(skeleton) == passes
