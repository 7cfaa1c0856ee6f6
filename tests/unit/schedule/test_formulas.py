"""Closed forms against the simulation, everywhere in a box and at random beyond it; and against the papers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from asked import Asked, all_requests, requests
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import PlanError
from weft.schedule import (
    NAMES,
    StageCosts,
    count_in_flight,
    formulas,
    generate,
    simulate,
    weight_versions,
)

COSTS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))


def compare(asked: Asked) -> None:
    """Every closed form of one request against its simulation at F = I = W = 1."""
    name, p, _, v = asked
    schedule = asked.schedule
    timeline, counted = simulate(schedule), count_in_flight(schedule)
    idle = formulas.idle_s(name, **asked.counts)
    assert [timeline.makespan_s - busy for busy in timeline.busy_s] == [idle] * p
    share = formulas.bubble_share(name, **asked.counts, num_steps=schedule.num_steps)
    assert share == pytest.approx(timeline.bubble_share, abs=1e-12)
    for until_weight, by_stage, by_rank in (
        (False, counted.by_stage_until_input, counted.by_rank_until_input),
        (True, counted.by_stage_until_weight, counted.by_rank_until_weight),
    ):
        extra = {**asked.counts, "until_weight": until_weight}
        assert by_stage == tuple(formulas.stage_in_flight(name, stage=s, **extra) for s in range(p * v))
        assert by_rank == tuple(formulas.rank_in_flight(name, rank=r, **extra) for r in range(p))
    assert weight_versions(schedule) == tuple(
        formulas.weight_versions(name, stage=s, num_ranks=p) for s in range(p * v)
    )


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_equal_the_simulation_in_the_whole_box(name: str) -> None:
    for asked in all_requests(name):
        compare(asked)


@settings(max_examples=60)
@given(requests())
def test_closed_forms_equal_the_simulation_beyond_it(asked: Asked) -> None:
    compare(asked)


@settings(max_examples=150)
@given(requests([name for name in NAMES if name not in formulas.EQUAL_COSTS_ONLY]), COSTS)
def test_closed_forms_hold_for_any_costs_that_are_equal_over_stages(asked: Asked, costs: tuple[int, int, int]) -> None:
    keys = dict(zip(("forward_s", "backward_input_s", "backward_weight_s"), costs, strict=True))
    timeline = simulate(asked.schedule, StageCosts.uniform(asked.p * asked.v, **keys))
    assert timeline.makespan_s - timeline.busy_s[0] == formulas.idle_s(asked.name, **asked.counts, **keys)


@pytest.mark.parametrize("name", sorted(formulas.EQUAL_COSTS_ONLY))
def test_where_there_is_no_closed_form_none_is_made_up(name: str) -> None:
    with pytest.raises(ValueError, match="no closed form"):
        formulas.idle_s(name, num_ranks=4, num_microbatches=8, virtual_stages=2, forward_s=2)


def test_an_unknown_name_gets_no_figures() -> None:
    counts = {"num_ranks": 4, "num_microbatches": 8}
    for ask in (
        lambda: formulas.idle_s("1b1f", **counts),
        lambda: formulas.bubble_share("1b1f", **counts),
        lambda: formulas.stage_in_flight("1b1f", stage=0, **counts),
        lambda: formulas.rank_in_flight("1b1f", rank=0, **counts),
        lambda: formulas.weight_versions("1b1f", stage=0, num_ranks=4),
    ):
        with pytest.raises(PlanError, match="no pipeline schedule"):
            ask()


@given(p=st.integers(1, 64), m=st.integers(1, 512))
def test_published_bubbles(p: int, m: int) -> None:
    """GPipe and 1F1B (p-1)/(m+p-1); naive (p-1)/p; ZB-H1 (p-1)(F+I-W) for m >= p and W the shortest part."""
    counts = {"num_ranks": p, "num_microbatches": m}
    for name in ("gpipe", "1f1b"):
        assert formulas.bubble_share(name, **counts) == pytest.approx(float(Fraction(p - 1, m + p - 1)))
    assert formulas.bubble_share("naive", **counts) == pytest.approx(float(Fraction(p - 1, p)))
    if m >= p:
        costs = {"forward_s": 5, "backward_input_s": 4, "backward_weight_s": 3}
        assert formulas.idle_s("zero_bubble", **counts, **costs) == (p - 1) * (5 + 4 - 3)


@given(p=st.integers(1, 32), rounds=st.integers(1, 16), v=st.integers(1, 8))
def test_published_bubble_of_interleaving(p: int, rounds: int, v: int) -> None:
    counts = {"num_ranks": p, "num_microbatches": p * rounds, "virtual_stages": v}
    for name in ("interleaved_1f1b", "looped_bfs"):
        expected = float(Fraction(p - 1, v * p * rounds + p - 1))
        assert formulas.bubble_share(name, **counts) == pytest.approx(expected)


def test_published_memory() -> None:
    """Interleaving holds 1 + (p-1)/(pv) times 1F1B's on rank 0 (arXiv 2205.05198); ZB-V what 1F1B's rank 0 does."""
    p, m, v = 8, 64, 4
    rank_0 = formulas.rank_in_flight("interleaved_1f1b", rank=0, num_ranks=p, num_microbatches=m, virtual_stages=v)
    assert rank_0 == p * v * (1 + (p - 1) / (p * v))
    zbv = formulas.rank_in_flight("zbv", rank=3, num_ranks=p, num_microbatches=m, virtual_stages=2)
    assert zbv == 2 * formulas.rank_in_flight("1f1b", rank=0, num_ranks=p, num_microbatches=m)


def test_schedules_that_never_drain_have_no_bubble_in_the_long_run() -> None:
    for name in formulas.NEVER_DRAIN:
        assert formulas.bubble_share(name, num_ranks=4, num_microbatches=8) == 0
        assert formulas.bubble_share(name, num_ranks=4, num_microbatches=8, num_steps=2) == pytest.approx(3 / 19)


def test_the_classic_saving_is_three_eighths() -> None:
    """Four stages, four micro-batches: F-then-B holds 16, 1F1B 4 + 3 + 2 + 1."""
    held = {
        name: sum(count_in_flight(generate(name, num_ranks=4, num_microbatches=4)).by_stage_until_weight)
        for name in ("gpipe", "1f1b")
    }
    assert held == {"gpipe": 16, "1f1b": 10}


@pytest.mark.parametrize("name", NAMES)
def test_arrays_give_elementwise_what_ints_give(name: str) -> None:
    asked = all_requests(name, most_ranks=5, most_microbatches=12, most_stages=3)
    p, m, v = (np.array([getattr(one, key) for one in asked]) for key in "pmv")
    counts = {"num_ranks": p, "num_microbatches": m, "virtual_stages": v}
    rank = p - 1
    whole = {
        "share": formulas.bubble_share(name, **counts),
        "stage": formulas.stage_in_flight(name, stage=rank, **counts),
        "rank": formulas.rank_in_flight(name, rank=rank, **counts),
        "versions": formulas.weight_versions(name, stage=rank, num_ranks=p),
    }
    for index, one in enumerate(asked):
        last = one.p - 1
        assert whole["share"][index] == formulas.bubble_share(name, **one.counts)
        assert whole["stage"][index] == formulas.stage_in_flight(name, stage=last, **one.counts)
        assert whole["rank"][index] == formulas.rank_in_flight(name, rank=last, **one.counts)
        assert whole["versions"][index] == formulas.weight_versions(name, stage=last, num_ranks=one.p)
