"""Which part of each parameter a rank of a line holds, and which degrees are refused, with the nearest legal ones."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES

from weft.core.errors import TensorParallelError
from weft.engine.tp.one_d_shards import one_d_shards, repeats
from weft.engine.weights.local_shards import shard_parameters
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.tp.finder import find_tensor_layout


def parts_of(family: str, degree: int, place: int, *, sequence_parallel: bool = False) -> dict[str, object]:
    model = build_skeleton(build_config(FAMILIES[family], vocab_size=257))
    layout = describe(model)
    tensors = find_tensor_layout(model, layout)
    return dict(one_d_shards(model, layout, tensors, degree=degree, place=place, sequence_parallel=sequence_parallel))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_together_hold_every_parameter_as_often_as_they_say(family: str, degree: int) -> None:
    model = build_skeleton(build_config(FAMILIES[family], vocab_size=257))
    held = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for place in range(degree):
        for name, part in parts_of(family, degree, place).items():
            for chunk in part.chunks:  # type: ignore[attr-defined]
                held[name][chunk.global_index] += 1.0 / chunk.copies
    for name, times in held.items():
        assert torch.equal(times, torch.ones_like(times)), name


def test_only_shared_gradients_are_summed() -> None:
    def summed(sequence_parallel: bool) -> set[str]:
        parts = parts_of("qwen3-tied", 2, 0, sequence_parallel=sequence_parallel)
        return {name for name, part in parts.items() if any(chunk.summed_over for chunk in part.chunks)}  # type: ignore[attr-defined]

    heads = {f"model.layers.{layer}.self_attn.{norm}.weight" for layer in (0, 1) for norm in ("q_norm", "k_norm")}
    stream = {
        f"model.layers.{layer}.{norm}.weight"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    assert summed(False) == heads
    assert summed(True) == heads | stream


def test_key_value_heads_fewer_than_ranks_are_repeated_by_neighbours() -> None:
    chunks = [parts_of("llama", 4, place)["model.layers.0.self_attn.k_proj.weight"].chunks[0] for place in range(4)]  # type: ignore[attr-defined]
    assert [chunk.offsets[0] for chunk in chunks] == [0, 0, 8, 8]
    assert {(chunk.copies, chunk.summed_over) for chunk in chunks} == {(2, "repeat2")}


def test_a_degree_that_does_not_divide_names_the_nearest_that_do() -> None:
    with pytest.raises(
        TensorParallelError, match="4 heads, which do not divide over 3 tensor-parallel ranks"
    ) as caught:
        parts_of("llama", 3, 0)
    assert "2 and 4" in caught.value.hint


def test_values_stay_in_their_places() -> None:
    model = build_skeleton(build_config(FAMILIES["gpt2"], vocab_size=257)).to_empty(device="cpu")
    model.tie_weights()  # type: ignore[operator]
    layout = describe(model)
    tensors = find_tensor_layout(model, layout)
    before = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape) + index
        before[name] = parameter.detach().clone()
    parts = one_d_shards(model, layout, tensors, degree=2, place=1, sequence_parallel=False)
    shard_parameters(model, layout, parts)
    fused = model.get_parameter("transformer.h.0.attn.c_attn.weight")
    whole = before["transformer.h.0.attn.c_attn.weight"]
    # the second half of each of q, k and v, not the second half of all
    assert torch.equal(fused, torch.cat([whole[:, 16:32], whole[:, 48:64], whole[:, 80:96]], dim=1))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert repeats(tensors, 2) == set()
