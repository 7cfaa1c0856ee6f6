"""Soft-capped attention is never left to a kernel that does not know the cap, whatever transformers supports."""

from __future__ import annotations

import pytest
import transformers

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton

CONFIG = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(("cap", "expected"), [(50.0, "eager"), (None, "sdpa")])
def test_a_capped_model_writes_its_scores(cap: float | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # as in transformers 5.17, where the fused path is offered and drops the cap
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    spec = ModelSpec(type="gemma2", config={**CONFIG, "attn_logit_softcapping": cap})
    model = build_skeleton(build_config(spec, vocab_size=257))
    assert model.config._attn_implementation == expected  # type: ignore[union-attr]
