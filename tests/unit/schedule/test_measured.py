"""A measured timeline: its mean costs give the same run again, and what ranks did fills their time without a rest."""

from __future__ import annotations

import pytest

from weft.schedule import (
    NAMES,
    GapKind,
    StageCosts,
    Timeline,
    gap_seconds,
    gaps,
    generate,
    mean_costs,
    replay,
    simulate,
)

VIRTUAL = {"interleaved_1f1b": 2, "looped_bfs": 2, "zbv": 2, "dualpipev": 2}
SYNCHRONOUS = [name for name in NAMES if not name.startswith("pipedream")]


def made(name: str, *, send_s: float = 0.25) -> tuple[Timeline, list[list[float]], StageCosts]:
    """As if measured: unequal stages, every rank turns to its next action at once."""
    schedule = generate(name, num_ranks=2, num_microbatches=4, virtual_stages=VIRTUAL.get(name, 1))
    stages = range(schedule.num_stages)
    is_cut = any(action.kind == "W" for actions in schedule.ranks for action in actions)
    costs = StageCosts(
        forward_s=tuple(1.0 + stage for stage in stages),
        backward_input_s=tuple(2.0 + stage for stage in stages),
        backward_weight_s=tuple(0.5 * is_cut for _ in stages),
        send_s=tuple(send_s for _ in stages[1:]),
        update_s=tuple(0.0 for _ in stages),
    )
    timeline = simulate(schedule, costs)
    return timeline, [[0.0, *ends[:-1]] for ends in timeline.ends], costs


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_the_costs_of_a_run_give_that_run_again(name: str) -> None:
    timeline, asked, costs = made(name)
    found = mean_costs(timeline, asked)
    assert found.forward_s == pytest.approx(costs.forward_s)
    again = simulate(timeline.schedule, found)
    if name != "dualpipev":  # it has whole and cut backwards of one stage, whose mean is neither
        assert again.makespan_s == pytest.approx(timeline.makespan_s)
    assert again.bubble_share == pytest.approx(timeline.bubble_share, abs=0.02)


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_busy_and_gaps_fill_the_time_of_every_rank(name: str) -> None:
    timeline, asked, _ = made(name)
    for rank, spent in enumerate(gap_seconds(timeline, asked)):
        assert timeline.busy_s[rank] + sum(spent.values()) == pytest.approx(timeline.makespan_s)
        assert spent["send"] == 0  # nobody took time to hand anything over
    assert all(gap.end_s > gap.start_s for gap in gaps(timeline, asked))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_replay_of_what_went_by_the_order_is_the_same(name: str) -> None:
    timeline, asked, _ = made(name)
    again = replay(timeline, mean_costs(timeline, asked))
    for rank in range(2):
        assert again.starts[rank] == pytest.approx(timeline.starts[rank])
        assert again.ends[rank] == pytest.approx(timeline.ends[rank])


def test_a_replay_keeps_slow_actions_and_leaves_out_stalls() -> None:
    schedule = generate("1f1b", num_ranks=2, num_microbatches=1)  # 0F0 0B0 | 1F0 1B0
    timeline = Timeline(schedule=schedule, starts=((10.0, 29.0), (14.0, 22.0)), ends=((13.0, 30.0), (21.0, 23.0)))
    again = replay(timeline, StageCosts.uniform(2, send_s=0.5))
    assert again.starts == ((0.0, 12.0), (3.5, 10.5))
    assert again.ends == ((3.0, 13.0), (10.5, 11.5))


def test_waiting_is_idle_until_the_message_is_made_and_then_receiving() -> None:
    schedule = generate("1f1b", num_ranks=2, num_microbatches=1)  # 0F0 0B0 | 1F0 1B0
    timeline = Timeline(schedule=schedule, starts=((10.0, 17.0), (13.0, 14.5)), ends=((12.0, 18.0), (14.0, 16.0)))
    asked = ((9.5, 12.2), (9.0, 14.5))
    assert [(gap.rank, gap.kind, gap.start_s, gap.end_s) for gap in gaps(timeline, asked)] == [
        (0, GapKind.SEND, 12.0, 12.2),
        (0, GapKind.IDLE, 12.2, 16.0),
        (0, GapKind.RECEIVE, 16.0, 17.0),
        (1, GapKind.IDLE, 10.0, 12.0),
        (1, GapKind.RECEIVE, 12.0, 13.0),
        (1, GapKind.IDLE, 14.0, 14.5),
        (1, GapKind.IDLE, 16.0, 18.0),
    ]
    assert mean_costs(timeline, asked).send_s == (1.0,)


def test_a_message_that_lay_ready_says_nothing_of_its_way() -> None:
    timeline, asked, _ = made("gpipe", send_s=0.0)
    late = [[at + (0.5 if rank == 1 else 0.0) for at in own] for rank, own in enumerate(asked)]
    hops = mean_costs(timeline, late).send_s
    assert hops == (0.0,)
