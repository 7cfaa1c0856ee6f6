"""The probe names what mixes positions outside of attention, and passes families whose rows can be divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.cp import probe
from weft.models.cp.probe import why_not_divided

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
COMPRESSED: dict[str, Any] = {
    **SIZES, "n_routed_experts": 4, "moe_intermediate_size": 16, "q_lora_rank": 16, "head_dim": 8, "o_groups": 2,
    "index_n_heads": 4, "index_head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


def answer(model_type: str, config: dict[str, Any]) -> str:
    return why_not_divided(build_skeleton(build_config(ModelSpec(type=model_type, config=config), vocab_size=257)))


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", SIZES),
        ("gemma3_text", {**SIZES, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        ("llama", {**SIZES, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}),
        ("deepseek_v4", {**COMPRESSED, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_models_whose_attention_alone_mixes_positions_pass(model_type: str, config: dict[str, Any]) -> None:
    assert answer(model_type, config) == ""


@pytest.mark.parametrize(
    ("model_type", "config", "word"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "attention interface"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "attention interface"),
    ],
)
def test_other_models_are_refused_with_a_reason(model_type: str, config: dict[str, Any], word: str) -> None:
    assert word in answer(model_type, config)


@pytest.mark.parametrize("layer", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_keys_of_several_positions_are_refused(layer: str) -> None:
    """One of 4 positions, and one of 128: shorter rows have none, so a rank's part would miss what whole rows have."""
    reason = answer("deepseek_v4", {**COMPRESSED, "layer_types": ["sliding_attention", layer]})
    assert "model.layers.1.self_attn (DeepseekV4Attention) attends to keys of several positions each" in reason


def test_a_module_that_mixes_positions_is_named() -> None:
    model = build_skeleton(build_config(ModelSpec(type="llama", config=SIZES), vocab_size=257))
    mlp = type(model.get_submodule("model.layers.0.mlp"))
    forward = mlp.forward
    probe._answer.cache_clear()
    mlp.forward = lambda self, x: (out := forward(self, x)) + out.roll(1, 1)
    try:
        assert "model.layers.0.mlp (LlamaMLP) mixes positions outside of attention" in why_not_divided(model)
    finally:
        mlp.forward = forward
        probe._answer.cache_clear()


def test_the_probe_leaves_the_random_state_and_the_model_alone() -> None:
    model = build_skeleton(build_config(ModelSpec(type="llama", config=SIZES), vocab_size=257))
    probe._answer.cache_clear()
    before = torch.get_rng_state()
    why_not_divided(model)
    assert torch.equal(before, torch.get_rng_state())
    assert model.config._attn_implementation == "sdpa"
