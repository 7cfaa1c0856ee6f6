"""The expected of tensor parallelism, counted by hand for two blocks of attention and MLP."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weft.core.plan import Plan
from weft.models.tp.layout import LinearShards, ParameterShards, Region, Segment, TensorLayout
from weft.verify.evidence import Evidence
from weft.verify.expected_tp import ExpectedTP, added, expected_of_tp
from weft.verify.facts import check_collectives

ONE = (Segment(units=4),)


def dense(name: str, kind: Any = "mlp") -> Region:
    linears = (
        LinearShards(name=f"{name}.up", side="column", outputs=ONE, inputs=ONE),
        LinearShards(name=f"{name}.down", side="row", outputs=ONE, inputs=ONE),
    )
    return Region(kind=kind, name=name, entries=(name,), linears=linears)


EXPERTS = Region(
    kind="experts",
    name="e",
    entries=("e",),
    tensors=(ParameterShards(name="e.up", dim=0, segments=ONE),),
    leaves_at="e",
)
LAYOUT = TensorLayout(
    regions=tuple(dense(name) for name in "abcd"), embedding="table", head="head", hidden_size=8, replicated={}
)
USED = {f"{name}.up.weight" for name in "abcd"} | {"e.up"}
FACTS = ExpectedTP(layout=LAYOUT, is_loss_sharded=True, num_repeated=0, is_partly_frozen=False, shared_sums=1)


def expected(*, layout: TensorLayout = LAYOUT, used: set[str] = USED, **given: Any) -> dict[str, tuple[int, int]]:
    switches = {key: given.pop(key) for key in ("sequence_parallel",) if key in given}
    tables = {
        "mesh": {"tp": 2},
        "tensor_parallel": {"loss_parallel": given.get("is_loss_sharded", True), **switches},
        "pipeline": {"microbatches": given.pop("microbatches", 1)},
    }
    return expected_of_tp(dataclasses.replace(FACTS, **given), layout, Plan.from_tables(tables), used=used)


def test_without_a_stream_everything_is_all_reduced() -> None:
    # 4 exits, the table, 4 entries backward, the head backward, 2 of the loss; a step's shared gradients
    assert expected(sequence_parallel=False) == {"all_reduce": (13, 13)}
    assert expected(sequence_parallel=False, microbatches=3) == {"all_reduce": (37, 37)}
    assert expected(sequence_parallel=False, is_loss_sharded=False) == {"all_reduce": (11, 11), "all_gather": (1, 1)}


def test_a_fused_loss_sends_two_sums_a_stretch_and_gathers_no_logits() -> None:
    cut = expected(sequence_parallel=False)["all_reduce"][0]
    for is_loss_sharded in (True, False):
        found = expected(sequence_parallel=False, is_loss_sharded=is_loss_sharded, fused_sums=6)
        assert found == {"all_reduce": (cut - 2 + 6,) * 2}


def test_with_a_stream_regions_gather_and_scatter() -> None:
    assert expected() == {"all_gather": (10, 10), "reduce_scatter": (8, 8), "all_reduce": (5, 5)}


def test_experts_take_tokens_choices_and_weights() -> None:
    layout = dataclasses.replace(LAYOUT, regions=(EXPERTS,))
    # gathers: up to three things in, the exit's backward, two ends; scatters: the exit, one or two gradients
    assert expected(layout=layout) == {"all_gather": (4, 6), "reduce_scatter": (2, 3), "all_reduce": (5, 5)}


def test_a_region_that_two_blocks_share_is_passed_twice() -> None:
    assert expected(sequence_parallel=False, passes={"d": 2}) == {"all_reduce": (15, 15)}


def test_a_region_without_gradients_takes_no_part() -> None:
    idle = {name for name in USED if not name.startswith("d")}
    assert expected(sequence_parallel=False, used=idle) == {"all_reduce": (11, 11)}


def test_recompute_repeats_forwards_but_for_what_a_block_ends_with() -> None:
    assert expected(sequence_parallel=False, num_repeated=2) == {"all_reduce": (15, 17)}
    # entries are gathered again: 4; the last exit of a block is not awaited, nor is the end of the stream
    assert expected(num_repeated=2) == {"all_gather": (14, 15), "reduce_scatter": (10, 12), "all_reduce": (5, 5)}


def test_blocks_that_a_budget_keeps_are_not_repeated() -> None:
    # of four exits two are repeated, one of them the last thing its block sends
    assert expected(sequence_parallel=False, num_repeated=1, kept=("a", "b")) == {"all_reduce": (14, 15)}
    assert expected(num_repeated=1, kept=("a", "b")) == {
        "all_gather": (12, 13),
        "reduce_scatter": (9, 10),
        "all_reduce": (5, 5),
    }


def test_what_is_frozen_may_lack_a_backward() -> None:
    assert expected(sequence_parallel=False, is_partly_frozen=True) == {"all_reduce": (8, 13)}


def test_promises_of_two_axes_add_up() -> None:
    assert added({"all_reduce": (1, 2)}, {"all_reduce": (3, 3), "all_gather": (1, 1)}) == {
        "all_reduce": (4, 5),
        "all_gather": (1, 1),
    }


@pytest.mark.parametrize(("counts", "is_ok"), [({"all_reduce": 13}, True), ({"all_reduce": 12}, False)])
def test_a_count_that_was_not_promised_is_wrong(counts: dict[str, int], is_ok: bool) -> None:
    plan = Plan.from_tables({"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}})
    found = Evidence(tensors=FACTS, collectives=counts, first_gradients=dict.fromkeys(USED))  # type: ignore[arg-type]
    assert check_collectives(plan, found).ok == is_ok


def test_a_grid_is_not_judged() -> None:
    found = Evidence(tensors=dataclasses.replace(FACTS, layout=None), collectives={"broadcast": 3})
    plan = Plan.from_tables({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}})
    assert "not judged" in check_collectives(plan, found).detail
