"""Low-bit key-value caches: what is read back, windows, bytes as `weft inference` predicts them."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from weft import hardware
from weft.cli.generate import CacheDtype
from weft.generate.kv_cache import FORMATS, LowBitLayer, cache_bytes, layers_in_16_bits, low_bit_cache
from weft.plan.ask import resolve_model
from weft.plan.inference import CacheKind, estimate_inference

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "gemma3_text": _SIZES | {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": _SIZES
    | {
        "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}
# the share of the logits that rounding moves: random weights, 8 features per head
_MOVED = {"fp8": 0.06, "int8": 0.02, "int4": 0.3}


def built(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family]), dtype=torch.float32).eval()


@torch.inference_mode()
def logits_in_pieces(model: Any, ids: torch.Tensor, cache: Any, pieces: list[int]) -> torch.Tensor:
    made = [model(input_ids=one, past_key_values=cache, use_cache=True).logits for one in ids.split(pieces, dim=1)]
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_16_bit_cache_but_for_rounding(family: str, kind: str) -> None:
    model = built(family)
    ids = torch.randint(3, 96, (2, 40), generator=torch.Generator().manual_seed(1))
    plain = logits_in_pieces(model, ids, DynamicCache(config=model.config), [20] + [1] * 20)
    cache = low_bit_cache(model.config, kind)
    low = logits_in_pieces(model, ids, cache, [20] + [1] * 20)
    error = ((low - plain).norm() / plain.norm()).item()
    assert 0 < error < _MOVED[kind]
    assert layers_in_16_bits(cache) == 0
    # the same rounded vectors however the tokens were grouped
    again = logits_in_pieces(model, ids, low_bit_cache(model.config, kind), [7, 13, 5, 15])
    torch.testing.assert_close(again, low, rtol=1e-4, atol=1e-4 * float(low.abs().max()))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("tokens", [5, 40])
def test_bytes_are_as_predicted(family: str, kind: str, tokens: int) -> None:
    model = built(family)
    cache = low_bit_cache(model.config, kind)
    logits_in_pieces(model, torch.randint(3, 96, (3, tokens)), cache, [tokens])
    shape, _ = resolve_model(model.config.to_dict())
    predicted = estimate_inference(shape, hardware.cluster("1xH100-80GB"), cache=kind, context=tokens)  # type: ignore[arg-type]
    windows = sum(bool(layer.is_sliding) for layer in cache.layers)
    # transformers keeps one token fewer than the window: the newest is in the forward
    of_window = windows * (min(tokens, _WINDOW) - min(tokens, _WINDOW - 1)) * 2 * 2
    width = {"fp8": 8 + 2, "int8": 8 + 2, "int4": 4 + 2}[kind]
    assert cache_bytes(cache) == 3 * (predicted.cache_bytes_per_sequence - of_window * width)


def test_every_format_has_a_name_in_the_planner_and_the_command() -> None:
    assert {"bf16", *FORMATS} == set(get_args(CacheKind)) == {str(one.value) for one in CacheDtype}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(FORMATS)),
    features=st.sampled_from([2, 8, 64]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 10**6),
)
def test_each_number_errs_by_half_a_step_of_its_vector(kind: str, features: int, scale: float, seed: int) -> None:
    form = FORMATS[kind]
    vectors = torch.randn(2, 3, 4, features, generator=torch.Generator().manual_seed(seed)) * scale
    vectors[0, 0, 0] = 0
    codes, scales = form.encode(vectors)
    assert codes.shape[-1] == features // form.codes_per_byte
    read = form.decode(codes, scales, torch.float32)
    largest = vectors.abs().amax(-1, keepdim=True)
    step = vectors.abs() * 2**-3 + largest * 2**-9 / 448 if form.is_float else largest / form.largest
    # a scale is rounded to 8 bits: steps are wider by 2^-8, or the largest code is too small by as much
    assert ((read - vectors).abs() <= 0.5 * step * (1 + 2**-7) + largest * 2**-8).all()
    assert torch.equal(read[0, 0, 0], torch.zeros(features))


@pytest.mark.parametrize("window", [None, 6])
def test_rows_can_be_reordered_and_a_cache_used_again(window: int | None) -> None:
    layer = LowBitLayer(FORMATS["int8"], window=window)
    states = torch.randn(2, 1, 5, 4)
    keys, _ = layer.update(states, states)
    layer.reorder_cache(torch.tensor([1, 1]))
    moved, _ = layer.update(states[:, :, :1], states[:, :, :1])
    assert torch.equal(moved[0, :, :-1], keys[1])
    assert torch.equal(moved[0, :, :-1], moved[1, :, :-1])
    layer.reset()
    assert layer.get_seq_length() == 0
    assert torch.equal(layer.update(states, states)[0], keys)
