"""Which shard of each parameter a rank of a grid holds, and which models and sizes grids refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES

from weft.core.errors import NotBuiltError, TensorParallelError
from weft.core.plan import TensorParallel
from weft.core.run_spec import ModelSpec
from weft.core.shards import LocalShard
from weft.core.tensor_grid import grid_sizes, place_of
from weft.engine.tp.grid import Grid
from weft.engine.tp_grid.apply import apply_grid
from weft.engine.tp_grid.shards import grid_shards
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.tp.finder import find_tensor_layout

MODES = {"2d": 4, "2.5d": 8, "3d": 8}


def grid_at(mode: str, rank: int = 0, degree: int | None = None) -> Grid:
    sizes = grid_sizes(mode, degree or MODES[mode])
    return Grid(mode=mode, sizes=sizes, place=place_of(sizes, rank))


def skeleton(family: str, **config: Any) -> Any:
    spec = FAMILIES[family]
    return build_skeleton(build_config(ModelSpec(type=spec.type, config={**spec.config, **config}), vocab_size=5))


def parts_of(model: Any, grid: Grid) -> dict[str, LocalShard]:
    layout = describe(model)
    return grid_shards(model, layout, find_tensor_layout(model, layout), grid)


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gpt2"])
@pytest.mark.parametrize("mode", sorted(MODES))
def test_ranks_together_hold_every_parameter_as_often_as_they_say(family: str, mode: str) -> None:
    model = skeleton(family, vocab_size=257)
    held = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    for rank in range(MODES[mode]):
        for name, shard in parts_of(model, grid_at(mode, rank)).items():
            for chunk in shard.chunks:
                held[name][chunk.global_index] += 1.0 / chunk.copies
    for name, times in held.items():
        assert torch.equal(times, torch.ones_like(times)), name


def test_a_matrix_is_held_once_but_in_each_layer() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    elements = {}
    for mode in MODES:
        shard = parts_of(skeleton("llama"), grid_at(mode))[name]
        elements[mode] = sum(chunk.num_elements for chunk in shard.chunks)
        assert {chunk.summed_over for chunk in shard.chunks} == {"d" if mode == "2.5d" else None}
    assert elements == {"2d": 32 * 48 // 4, "2.5d": 32 * 48 // 4, "3d": 32 * 48 // 8}


@pytest.mark.parametrize(
    ("family", "mode", "config", "said"),
    [
        ("mixtral", "2d", {}, "experts are not sharded on grids"),
        ("llama", "2d", {"num_key_value_heads": 1}, "has 1 key-value heads, which a grid of side 2 does not divide"),
        ("llama", "2d", {"intermediate_size": 49}, "has 49 columns"),
        ("llama", "3d", {"intermediate_size": 50}, "a chunk of the outputs of model.layers.0.mlp.gate_proj is 25"),
        ("llama", "3d", {"vocab_size": 5}, "a vocabulary of 5 is too small for 4 chunks"),
    ],
)
def test_what_does_not_divide_is_refused(family: str, mode: str, config: dict[str, int], said: str) -> None:
    with pytest.raises(TensorParallelError) as caught:
        parts_of(skeleton(family, **config), grid_at(mode))
    assert said in str(caught.value)
    assert "1d" in caught.value.hint or "mesh.tp" in caught.value.hint


def test_a_family_that_was_not_compared_is_refused() -> None:
    model = skeleton("llama")
    model.config.model_type = "llama-of-another-kind"
    with pytest.raises(TensorParallelError, match="was not compared"):
        parts_of(model, grid_at("2d"))


@pytest.mark.parametrize(("family", "whole", "said"), [("gpt2", False, "dropout"), ("llama", True, "objective")])
def test_the_cube_refuses_what_depends_on_rows(family: str, whole: bool, said: str) -> None:
    model = skeleton(family)
    layout = describe(model)
    tensors = find_tensor_layout(model, layout)
    with pytest.raises(NotBuiltError, match=said):
        apply_grid(model, layout, tensors, TensorParallel(mode="3d"), grid=grid_at("3d"), keep_logits_full=whole)
