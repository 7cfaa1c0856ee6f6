"""Times worked out by hand; bounds that hold for any costs; a slow oracle that agrees on random costs."""

from __future__ import annotations

import math

import pytest
from asked import Asked, requests
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.schedule import Action, Kind, Schedule, StageCosts, generate, simulate


def random_costs(draw: st.DrawFn, num_stages: int) -> StageCosts:
    """Whole numbers, so that sums are exact; every stage and every way its own."""

    def some(least: int, count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(st.integers(least, 9), min_size=count, max_size=count)))

    return StageCosts(
        forward_s=some(1, num_stages),
        backward_input_s=some(1, num_stages),
        backward_weight_s=some(1, num_stages),
        send_s=some(0, num_stages - 1),
        update_s=some(0, num_stages),
    )


@st.composite
def timed(draw: st.DrawFn) -> tuple[Schedule, StageCosts]:
    asked = draw(requests())
    asked = Asked(asked.name, min(asked.p, 4), asked.m, asked.v)
    if asked.name == "interleaved_1f1b":
        asked = asked._replace(m=asked.m - asked.m % max(1, asked.m // asked.p))
    return asked.schedule, random_costs(draw, asked.p * asked.v)


def duration_of(action: Action, costs: StageCosts) -> float:
    by_kind = {
        Kind.F: costs.forward_s,
        Kind.I: costs.backward_input_s,
        Kind.W: costs.backward_weight_s,
        Kind.U: costs.update_s,
    }
    if action.kind is Kind.B:
        return costs.backward_input_s[action.stage] + costs.backward_weight_s[action.stage]
    return by_kind[action.kind][action.stage]


def earliest_ends(schedule: Schedule, costs: StageCosts) -> dict[Action, float]:
    """The oracle: the longest path to each action, relaxed until nothing moves. Slow, and written another way."""
    ends = {action: 0.0 for actions in schedule.ranks for action in actions}

    def arrival(stage: int, source: int, microbatch: int, kinds: tuple[Kind, ...]) -> float:
        found = next(action for kind in kinds if (action := Action(kind, source, microbatch)) in ends)
        apart = schedule.stage_to_rank[stage] != schedule.stage_to_rank[source]
        return ends[found] + (costs.send_s[min(stage, source)] if apart else 0)

    def ready(action: Action) -> float:
        kind, stage, microbatch = action
        if kind is Kind.U or (kind is Kind.F and stage == 0):
            return 0
        if kind is Kind.F:
            return arrival(stage, stage - 1, microbatch, (Kind.F,))
        if kind is Kind.W:
            return arrival(stage, stage, microbatch, (Kind.I,))
        if stage == schedule.num_stages - 1:
            return arrival(stage, stage, microbatch, (Kind.F,))
        return arrival(stage, stage + 1, microbatch, (Kind.B, Kind.I))

    moved = True
    while moved:
        moved = False
        for actions in schedule.ranks:
            clock = 0.0
            for action in actions:
                clock = max(clock, ready(action)) + duration_of(action, costs)
                moved = moved or clock != ends[action]
                ends[action] = clock
    return ends


@settings(max_examples=40)
@given(timed())
def test_simulation_equals_the_longest_path(case: tuple[Schedule, StageCosts]) -> None:
    schedule, costs = case
    expected = earliest_ends(schedule, costs)
    timeline = simulate(schedule, costs)
    assert {event.action: event.end_s for event in timeline.events()} == expected
    assert all(event.end_s - event.start_s == duration_of(event.action, costs) for event in timeline.events())


def test_two_stages_two_microbatches_by_hand() -> None:
    """F 1, B 2: rank 0 waits two slots for the first gradient and one for the second."""
    timeline = simulate(generate("1f1b", num_ranks=2, num_microbatches=2))
    assert timeline.starts == ((0, 1, 4, 7), (1, 2, 4, 5))
    assert timeline.ends == ((1, 2, 6, 9), (2, 4, 5, 7))


def test_sends_delay_the_receiver_and_busy_nobody() -> None:
    costs = StageCosts.uniform(2, send_s=10)
    timeline = simulate(generate("gpipe", num_ranks=2, num_microbatches=1), costs)
    assert timeline.starts == ((0, 24), (11, 12))
    assert timeline.busy_s == (3, 3)


def test_neighbours_on_one_rank_send_nothing() -> None:
    """The turn of a V: stages 1 and 2 are both on rank 1."""
    costs = StageCosts.uniform(4, send_s=10)
    starts = {
        e.action: e.start_s
        for e in simulate(generate("zbv", num_ranks=2, num_microbatches=1, virtual_stages=2), costs).events()
    }
    assert starts[Action(Kind.F, 2, 0)] == starts[Action(Kind.F, 1, 0)] + 1
    assert starts[Action(Kind.F, 1, 0)] == starts[Action(Kind.F, 0, 0)] + 11


@settings(max_examples=40)
@given(requests(), st.sampled_from([0.5, 2, 1024]))
def test_time_scales_with_the_costs(asked: Asked, factor: float) -> None:
    plain = simulate(asked.schedule)
    costs = StageCosts.uniform(asked.p * asked.v, forward_s=factor, backward_input_s=factor, backward_weight_s=factor)
    scaled = simulate(asked.schedule, costs)
    assert scaled.makespan_s == factor * plain.makespan_s
    assert scaled.bubble_share == plain.bubble_share


@settings(max_examples=40)
@given(timed())
def test_no_step_beats_the_busiest_rank_nor_the_way_of_one_microbatch(case: tuple[Schedule, StageCosts]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    way = sum(costs.forward_s) + sum(costs.backward_input_s)
    assert timeline.makespan_s >= max(*timeline.busy_s, way)
    assert all(0 <= share < 1 for share in timeline.bubble_share_by_rank)
    assert math.isclose(sum(timeline.bubble_share_by_rank) / schedule.num_ranks, timeline.bubble_share, abs_tol=1e-12)


def test_the_clock_costs_no_time_of_its_own() -> None:
    """A schedule of one rank runs without a gap."""
    timeline = simulate(generate("interleaved_1f1b", num_ranks=1, num_microbatches=5, virtual_stages=3))
    assert timeline.idle_s == 0
    assert timeline.makespan_s == pytest.approx(5 * 3 * 3)


def test_zbv_never_waits_between_its_first_and_its_last_action() -> None:
    timeline = simulate(generate("zbv", num_ranks=6, num_microbatches=20, virtual_stages=2))
    spans = [ends[-1] - starts[0] for starts, ends in zip(timeline.starts, timeline.ends, strict=True)]
    assert timeline.busy_s == tuple(spans)
