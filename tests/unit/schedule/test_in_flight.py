"""What is held at once: counted by hand, bounded, and equal to an oracle that looks at times instead of orders."""

from __future__ import annotations

from asked import Asked, requests
from hypothesis import given, settings

from weft.schedule import Kind, Timeline, count_in_flight, generate, simulate


def test_one_forward_one_backward_holds_as_many_as_stages_follow() -> None:
    counted = count_in_flight(generate("1f1b", num_ranks=4, num_microbatches=8))
    assert counted.by_stage_until_weight == counted.by_rank_until_input == (4, 3, 2, 1)


def test_zero_bubble_holds_more_until_the_weight_backward() -> None:
    counted = count_in_flight(generate("zero_bubble", num_ranks=4, num_microbatches=8))
    assert counted.by_stage_until_input == (4, 3, 2, 1)
    assert counted.by_stage_until_weight == (4, 4, 4, 4)


def test_the_v_schedules_hold_the_same_on_every_rank() -> None:
    counts = {"num_ranks": 4, "num_microbatches": 12, "virtual_stages": 2}
    assert count_in_flight(generate("zbv", **counts)).by_rank_until_weight == (8,) * 4
    assert count_in_flight(generate("dualpipev", **counts)).by_rank_until_weight == (9,) * 4


def most_alive(timeline: Timeline, stage: int, freed_by: tuple[Kind, Kind]) -> int:
    """The oracle: lifetimes on the clock, an end and a start at the same instant not overlapping."""
    changes = []
    for event in timeline.events():
        if event.action.stage == stage and event.action.kind is Kind.F:
            changes.append((event.start_s, 1))
        elif event.action.stage == stage and event.action.kind in freed_by:
            changes.append((event.end_s, -1))
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


@settings(max_examples=40)
@given(requests())
def test_counts_equal_the_lifetimes_on_the_clock(asked: Asked) -> None:
    schedule = asked.schedule
    counted, timeline = count_in_flight(schedule), simulate(schedule)
    stages = range(schedule.num_stages)
    assert counted.by_stage_until_input == tuple(most_alive(timeline, s, (Kind.B, Kind.I)) for s in stages)
    assert counted.by_stage_until_weight == tuple(most_alive(timeline, s, (Kind.B, Kind.W)) for s in stages)


@settings(max_examples=60)
@given(requests())
def test_a_rank_never_holds_more_than_its_stages_peaks(asked: Asked) -> None:
    schedule, counted = asked.schedule, count_in_flight(asked.schedule)
    for rank, stages in enumerate(schedule.rank_to_stages):
        peaks = [counted.by_stage_until_weight[stage] for stage in stages]
        assert max(peaks) <= counted.by_rank_until_weight[rank] <= sum(peaks)
        assert counted.by_rank_until_input[rank] <= counted.by_rank_until_weight[rank]
