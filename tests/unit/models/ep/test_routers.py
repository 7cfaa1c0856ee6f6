"""Routers found by what they do: scoring, place of the logits, bias of the choice; and reasons where they are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from torch import nn

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.ep.finder import find_expert_layout
from weft.models.ep.routers import RouterLayout, find_routers

_BASE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_MOE = {**_BASE, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    **_BASE, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "mixtral": ({**_BASE, "num_local_experts": 6, "num_experts_per_tok": 2}, "softmax", None),
    "gpt_oss": ({**_BASE, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2}, "softmax", None),
    "qwen3_moe": ({**_MOE, "head_dim": 8}, "softmax", None),
    "deepseek_v3": (_DEEPSEEK, "sigmoid", "gate.e_score_correction_bias"),
    # a bias beside the router, and one in a module of its own
    "minimax_m2": (
        {**_BASE, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
        "sigmoid",
        "mlp.e_score_correction_bias",
    ),
    "ernie4_5_moe": (
        {**_BASE, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
        "softmax",
        "moe_statics.e_score_correction_bias",
    ),
}


def model(family: str, config: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_skeleton(build_config(ModelSpec(type=family, config=config), vocab_size=128))


def routers(family: str, config: dict[str, Any]) -> RouterLayout:
    built = model(family, config)
    return find_routers(built, find_expert_layout(built))


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_and_bias_are_found(family: str) -> None:
    config, scoring, bias = FAMILIES[family]
    found = routers(family, config)
    assert found.routers
    assert not found.declined
    for router in found.routers.values():
        assert (router.scoring, router.output) == (scoring, 0)
        assert (router.bias is None) == (bias is None)
        assert router.bias is None or router.bias.endswith(str(bias))


def test_a_router_with_other_weights_is_declined_with_a_reason() -> None:
    """phimoe masks scores before its weights."""
    found = routers("phimoe", {**_BASE, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2})
    assert not found.routers
    assert all("ratio of the weights" in reason for reason in found.declined.values())


def test_a_dense_model_has_none() -> None:
    assert routers("llama", _BASE) == RouterLayout(routers={})


def test_parameters_stay_on_meta() -> None:
    config, _, _ = FAMILIES["mixtral"]
    built = model("mixtral", config)
    find_routers(built, find_expert_layout(built))
    assert all(parameter.is_meta for parameter in built.parameters())
