"""A ring is refused for attention that is no softmax of scaled products, by the attention function's own results."""

from __future__ import annotations

import pytest

from weft.core.run_spec import ModelSpec
from weft.models.build import build_config, build_skeleton
from weft.models.cp.ring_probe import why_not_in_ring

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}
CASES = {
    "llama": ("llama", {}, "sdpa"),
    "windows": ("gemma3_text", {"sliding_window": 7}, "eager"),
    "sinks": ("gpt_oss", SINKS, "eager"),
}


def reason(model_type: str, config: dict[str, object], attention: str) -> str:
    spec = ModelSpec(type=model_type, config={**SIZES, **config})
    return why_not_in_ring(build_skeleton(build_config(spec, vocab_size=64), attention=attention))  # type: ignore[arg-type]


@pytest.mark.parametrize(("model_type", "config", "attention"), CASES.values(), ids=CASES)
def test_softmaxes_pass(model_type: str, config: dict[str, object], attention: str) -> None:
    assert reason(model_type, config, attention) == ""


def test_a_soft_cap_is_named() -> None:
    why = reason("gemma2", {"query_pre_attn_scalar": 8}, "eager")
    assert why == (
        "model.layers.0.self_attn (Gemma2Attention) attends otherwise than by a softmax of scaled products"
        " (softcap = 50.0)"
    )
    assert reason("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": None}, "eager") == ""
