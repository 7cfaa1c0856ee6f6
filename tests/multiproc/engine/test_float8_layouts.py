"""Products in float8 over tensor-parallel ranks and pipelines: the scales of one process, and its losses."""

from __future__ import annotations

import base64
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import BF16_SAME_LOSS_ABS

from weft.core.errors import TensorParallelError
from weft.core.float8_section import RECIPES
from weft.core.run_spec import ModelSpec
from weft.engine.kernels.float8_operands import Sharing
from weft.verify.float8_check import wrong_products

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
MODEL = ModelSpec(type="llama", config={**SIZES, "num_attention_heads": 4, "num_key_value_heads": 4})
NARROW = ModelSpec(type="llama", config={**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2})
# a rounding that falls the other way moves a loss by less than float8 itself does
SAME_LOSS_ABS = 5 * BF16_SAME_LOSS_ABS


def tables(recipe: str, **layout: Any) -> dict[str, Any]:
    return {"precision": {"preset": "bf16"}, "float8": {"linears": "all", "recipe": recipe}, **layout}


def products(rank: int, world: int) -> list[Any]:
    narrow = ModelSpec(type="llama", config={**SIZES, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 64})
    layout = {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}}
    engine = build_engine(narrow, tables("rowwise", **layout))
    wrong = wrong_products(engine)
    with mock.patch.object(Sharing, "largest", lambda self, own, **_: own):
        unreduced = wrong_products(engine)
    return [wrong, len(unreduced)]


def test_rows_that_ranks_divide_have_the_scale_of_whole_rows() -> None:
    for wrong, num_unreduced in run_ranks(products, 2):
        assert not wrong
        assert num_unreduced >= 2  # of the kinds of layers: divided by outputs, by inputs


def curves(rank: int, world: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for recipe in RECIPES:
        for is_stream in (False, True) if world > 1 else (False,):
            layout = {"mesh": {"tp": world}, "tensor_parallel": {"sequence_parallel": is_stream}}
            engine = build_engine(MODEL, tables(recipe, **layout))
            wrong = wrong_products(engine)
            with mock.patch.object(Sharing, "largest", lambda self, own, **_: own):
                unreduced = wrong_products(engine) if world > 1 else []
            losses = [loss for loss, _ in train_steps(engine, 2)]
            found[recipe, is_stream] = losses, wrong, len(unreduced), all(row.ok for row in engine.dtypes())
    if world > 1:
        with pytest.raises(
            TensorParallelError, match="a scale for 128 features, but a tensor-parallel rank holds 64 of"
        ):
            build_engine(NARROW, tables("blockwise", mesh={"tp": 2}))
    return found


@pytest.mark.extended
def test_tensor_parallel_ranks_have_the_scales_of_one_process() -> None:
    single, per_rank = run_ranks(curves, 1)[0], run_ranks(curves, 2, timeout_s=300.0)
    for rank in per_rank:
        for (recipe, is_stream), (losses, wrong, num_unreduced, is_ok) in rank.items():
            assert not wrong, (recipe, is_stream, wrong)
            assert is_ok, recipe
            assert losses == pytest.approx(single[recipe, False][0], abs=SAME_LOSS_ABS), (recipe, is_stream)
            # blocks are on one rank; what all ranks share is wrong without the reduction
            # blocks of 32 and 128 features never reach into another rank
            assert bool(num_unreduced) == (recipe not in ("blockwise", "mxfp8")), recipe


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"mesh": {"dp_replicate": 2}},
    "tp": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
}


def histories(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, layout in LAYOUTS.items() if world > 1 else [("one", {})]:
        if world == 1 or name != "one":
            engine = build_engine("llama", {**tables("delayed"), **layout})
            found[name] = train_steps(engine, 2), engine.float8.delayed_scalars()
    return found


def test_every_layout_has_the_amax_of_the_global_batch_on_every_rank() -> None:
    single, (first, second) = run_ranks(histories, 1)[0]["one"], run_ranks(histories, 2, timeout_s=200.0)
    for layout, (losses, history) in first.items():
        assert second[layout][1] == history
        assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in single[0]], abs=SAME_LOSS_ABS), layout
        for name, row in history.items():
            found, right = (
                np.frombuffer(base64.b64decode(one), "<f4").reshape(3, -1) for one in (row, single[1][name])
            )
            assert (found[1, 1] == right[1, 1]).all(), "the weights of the first step"
            assert found[0, :2] == pytest.approx(right[0, :2], rel=0.1), (layout, name)
        assert len(history) == len(single[1])


def split(rank: int, world: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for recipe in RECIPES:
        for schedule in ("1f1b", "zero_bubble"):
            layout = {"mesh": {"pp": 2}, "pipeline": {"schedule": schedule, "microbatches": 4}}
            engine = build_engine("llama", tables(recipe, **layout))
            found[recipe, schedule] = train_steps(engine, 3), [row for row in engine.dtypes() if not row.ok]
    return found


@pytest.mark.extended
def test_split_backwards_have_the_bits_of_whole_ones() -> None:
    for rank in run_ranks(split, 2, timeout_s=300.0):
        for recipe in RECIPES:
            assert rank[recipe, "zero_bubble"][0] == rank[recipe, "1f1b"][0], recipe
            assert not rank[recipe, "zero_bubble"][1], recipe
