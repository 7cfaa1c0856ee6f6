"""Skeletons: parameters on meta, buffers real, and a clear sentence for every config that cannot be trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES
from torch import nn
from transformers import AutoModelForCausalLM

from weft.core.errors import ModelError, NotBuiltError, TokenizerError
from weft.core.run_spec import ModelSpec
from weft.models.build import _HugeOnMeta, build_config, build_skeleton, parameters_on_meta

_LLAMA = FAMILIES["llama"].config


def config_of(model_type: str, **overrides: Any) -> Any:
    return build_config(ModelSpec(type=model_type, config=overrides), vocab_size=257, end_of_document=256)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_skeleton_spends_no_memory_on_weights_and_has_the_models_own_buffers(family: str) -> None:
    config = build_config(FAMILIES[family], vocab_size=257)
    model = build_skeleton(config)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert model.training
    reference = AutoModelForCausalLM.from_config(config)
    expected = dict(reference.named_buffers())
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shapes = {name: parameter.shape for name, parameter in reference.named_parameters()}
    assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes  # ties count once


def test_building_draws_no_random_number_and_leaves_torch_as_it_was() -> None:
    before, state = nn.init.normal_, torch.get_rng_state()
    build_skeleton(config_of("llama", **_LLAMA))
    assert nn.init.normal_ is before
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_huge_tensor_is_never_allocated() -> None:
    with parameters_on_meta():
        assert torch.empty(_HugeOnMeta.HUGE_ELEMENTS + 1).device.type == "meta"
        assert torch.zeros((2, _HugeOnMeta.HUGE_ELEMENTS)).device.type == "meta"
        assert torch.empty(4).device.type == "cpu"


def test_the_vocabulary_is_the_tokenizers_rounded_up_unless_given() -> None:
    assert config_of("llama", **_LLAMA).vocab_size == 320
    assert config_of("llama", **_LLAMA, vocab_size=300).vocab_size == 300
    with pytest.raises(TokenizerError, match="257 tokens but the model's vocabulary holds 200"):
        config_of("llama", **_LLAMA, vocab_size=200)


def test_special_tokens_outside_a_small_vocabulary_are_replaced() -> None:
    config = config_of("gpt2", n_embd=32, n_layer=1, n_head=4)  # GPT-2's own are 50256
    assert (config.bos_token_id, config.eos_token_id) == (None, 256)


def test_a_composite_config_takes_the_vocabulary_into_its_text_part() -> None:
    assert config_of("gemma3").get_text_config().vocab_size == 320
    assert config_of("gemma3", text_config={"hidden_size": 64}).get_text_config().hidden_size == 64


@pytest.mark.parametrize("asked", ["sdpa", "eager"])
def test_a_model_without_sdpa_uses_its_own_attention(asked: str) -> None:
    config = config_of("mamba", hidden_size=32, num_hidden_layers=1, state_size=4)
    assert build_skeleton(config, attention=asked).config._attn_implementation == "eager"
    assert build_skeleton(config_of("llama", **_LLAMA), attention=asked).config._attn_implementation == asked


def test_an_encoder_is_refused_since_it_would_read_the_tokens_it_predicts() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    with pytest.raises(ModelError, match="sees the tokens it is to predict") as caught:
        build_skeleton(config_of("bert", **sizes))
    assert "is_decoder = true" in caught.value.hint
    build_skeleton(config_of("bert", **sizes, is_decoder=True))


@pytest.mark.parametrize(
    ("model_type", "overrides", "error", "message", "hint"),
    [
        ("lama", {}, ModelError, "'lama' is not a causal LM type", "llama"),
        ("llama", {"hiden_size": 8}, ModelError, "LlamaConfig has no 'hiden_size'", "'hidden_size'"),
        ("llama", {"hidden_size": "wide"}, ModelError, "LlamaConfig refuses these values", "model.config"),
        ("mixtral", {"output_router_logits": True}, NotBuiltError, "own router loss", "balance_over = 'transformers'"),
    ],
)
def test_refusals(model_type: str, overrides: dict[str, Any], error: type, message: str, hint: str) -> None:
    with pytest.raises(error, match=message) as caught:
        config_of(model_type, **overrides)
    assert hint in caught.value.hint


def test_sizes_that_do_not_divide_are_one_sentence() -> None:
    config = config_of("llama", **{**_LLAMA, "num_hidden_layers": 1})
    config.num_attention_heads, config.head_dim = 0, None
    with pytest.raises(ModelError, match="a 'llama' model cannot be built from this config") as caught:
        build_skeleton(config)
    assert "divide" in caught.value.hint
