"""Where expert parallelism may divide: every family with experts of the installed transformers, at tiny sizes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from meta_models import RefusedError, build, draw
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.models.ep.finder import find_expert_layout

DIVIDED = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "hy_v4", "inkling_text", "jamba", "kimi_linear", "kolibri1", "laguna", "lfm2_moe",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text", "mixtral", "nemotron_h", "olmoe",
    "phimoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen4_exp",
    "qwen4_exp_text", "solar_open", "zaya",
)  # fmt: skip
DECLINED = {
    "dbrx": "its parameters are not stacked",
    "jetmoe": "its forward takes (inputs, expert_size)",
    "llama4": "its forward takes (hidden_states)",
    "llama4_text": "its forward takes (hidden_states)",
    "longcat_flash": "its parameters have 8 and 264 experts",
}


def tiny(model_type: str) -> nn.Module:
    """The first of a few draws that transformers builds; with an even number of experts or not."""
    error: Exception | None = None
    for seed in range(6):
        try:
            return build(model_type, draw(model_type, random.Random(seed), flags=seed == 0))
        except RefusedError as refused:
            error = refused
    raise RefusedError(f"{model_type}: {error}")


@pytest.mark.parametrize("model_type", DIVIDED)
def test_experts_are_found(model_type: str) -> None:
    model = tiny(model_type)
    layout = find_expert_layout(model)
    assert layout.layers
    for layer in layout.layers:
        module = model.get_submodule(layer.name)
        assert len(layer.parameters) >= 2
        assert {model.get_parameter(name).shape[0] for name in layer.parameters} == {layer.num_experts}
        assert all(getattr(module, key) == layer.num_experts for key in layer.counts)
        assert {f"{layer.name}.{name}" for name, _ in module.named_parameters()} == {*layer.parameters, *layer.shared}
        assert layer.top_k is not None
        assert 0 < layer.top_k <= layer.num_experts
    routed = [name for name in layout.declined if "shared" not in name]
    assert routed == []
    # no stacked parameter of a block was overlooked
    known = {name for layer in layout.layers for name in layer.parameters}
    stacked = {name for name, value in model.named_parameters() if value.ndim == 3 and ".experts." in name}
    assert stacked <= known


@pytest.mark.parametrize(("model_type", "reason"), DECLINED.items())
def test_other_experts_are_declined_with_a_reason(model_type: str, reason: str) -> None:
    layout = find_expert_layout(tiny(model_type))
    assert layout.layers == ()
    assert layout.declined
    assert any(reason in found for found in layout.declined.values()), layout.declined


@pytest.mark.extended
def test_no_other_family_has_experts() -> None:
    for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(DIVIDED) - set(DECLINED)):
        try:
            layout = find_expert_layout(tiny(model_type))
        except RefusedError:
            continue
        assert (layout.layers, layout.declined) == ((), {}), model_type


def test_gpt_oss_has_biases_and_its_layout_can_be_restricted() -> None:
    model = build("gpt_oss", draw("gpt_oss", random.Random(0)))
    layout = find_expert_layout(model)
    first = layout.layers[0]
    keys = [name.rpartition(".")[2] for name in first.parameters]
    assert keys == ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
    assert first.shared == ()
    assert layout.within(set(first.parameters)).layers == (first,)


class Normed(nn.Module):
    """Experts with a norm that all of them use."""

    def __init__(self, **counts: Any) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Parameter(torch.ones(3, 4, 2)), nn.Parameter(torch.ones(3, 2, 4))
        self.post_expert_norm = nn.LayerNorm(3)
        for key, value in counts.items():
            setattr(self, key, value)

    def forward(self, hidden: Any, index: Any, weights: Any) -> Any:
        return hidden


def test_a_norm_is_shared_and_a_module_without_its_count_is_declined() -> None:
    (layer,) = find_expert_layout(nn.ModuleDict({"experts_of": Normed(num_experts=3)})).layers
    assert layer.shared == ("experts_of.post_expert_norm.weight", "experts_of.post_expert_norm.bias")
    assert layer.counts == ("num_experts",)
    (reason,) = find_expert_layout(nn.ModuleDict({"experts_of": Normed()})).declined.values()
    assert "no attribute with its number of experts" in reason


def test_a_list_of_experts_is_declined() -> None:
    model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    assert find_expert_layout(model).declined == {"experts": "each of its experts is a module of its own"}
