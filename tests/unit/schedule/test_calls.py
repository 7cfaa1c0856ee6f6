"""Calls of a schedule that never drains: joined and drained they are its window, and no update comes too late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.schedule import Action, Calls, Kind, StageCosts, WeightRule, generate, simulate, version_for, versions_read

NAMES = ("pipedream", "pipedream_2bw")


@st.composite
def any_calls(draw: st.DrawFn) -> Calls:
    name = draw(st.sampled_from(NAMES))
    p = draw(st.integers(1, 6))
    least = p if name == "pipedream_2bw" else 1
    return Calls(name=name, num_ranks=p, num_microbatches=draw(st.integers(least, least + 6)))


def test_a_small_case_by_hand() -> None:
    calls = Calls(name="pipedream", num_ranks=2, num_microbatches=2)
    assert [" ".join(map(str, own)) for own in calls.actions(1)] == [
        "0F2 0B1 0U1 0F3 0B2 0U2",
        "1F2 1B2 1U2 1F3 1B3 1U3",
    ]
    assert [" ".join(map(str, own)) for own in calls.drain(1)] == ["0B3 0U3", ""]


def test_with_two_buffers_later_stages_update_later() -> None:
    calls = Calls(name="pipedream_2bw", num_ranks=3, num_microbatches=3)
    first, _, last = (" ".join(map(str, own)) for own in calls.actions(1))
    assert first == "0F3 0B1 0F4 0B2 0U2 0F5 0B3"
    assert last == "2F3 2B3 2F4 2B4 2U2 2F5 2B5"


@given(calls=any_calls(), num_calls=st.integers(1, 6))
def test_calls_and_drain_are_the_window(calls: Calls, num_calls: int) -> None:
    window = generate(
        calls.name, num_ranks=calls.num_ranks, num_microbatches=calls.num_microbatches, num_steps=num_calls
    )
    for rank, planned in enumerate(window.ranks):
        done = [action for call in range(num_calls) for action in calls.actions(call)[rank]]
        assert calls.first(num_calls).ranks[rank] == tuple(done)
        done += calls.drain(num_calls - 1)[rank]
        assert sorted(done) == sorted(planned)
        assert [a for a in done if a.kind is not Kind.U] == [a for a in planned if a.kind is not Kind.U]


@given(calls=any_calls(), num_calls=st.integers(1, 6))
def test_every_forward_finds_the_weights_it_reads(calls: Calls, num_calls: int) -> None:
    for stage in range(calls.num_ranks):
        newest, gone_back = 0, set()
        done = [action for call in range(num_calls) for action in calls.actions(call)[stage]]
        for action in (*done, *calls.drain(num_calls - 1)[stage]):
            if action.kind is Kind.F:
                assert version_for(calls.schedule, stage=stage, microbatch=action.microbatch) <= newest
            elif action.kind is Kind.B:
                gone_back.add(action.microbatch)
            else:
                assert action.microbatch in gone_back
                newest += 1


@given(calls=any_calls())
def test_a_version_needs_no_window(calls: Calls) -> None:
    window = generate(calls.name, num_ranks=calls.num_ranks, num_microbatches=calls.num_microbatches, num_steps=5)
    assert versions_read(window) == [
        [version_for(window, stage=stage, microbatch=index) for index in range(window.window)]
        for stage in range(window.num_stages)
    ]


def test_with_vertical_sync_every_stage_reads_what_the_first_reads() -> None:
    schedule = Calls(name="pipedream", num_ranks=3, num_microbatches=4, vertical_sync=True).schedule
    assert schedule.weight_rule is WeightRule.VERTICAL_SYNC
    assert {version_for(schedule, stage=stage, microbatch=7) for stage in range(3)} == {5}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_watch_saw_can_be_simulated(name: str) -> None:
    """And has no bubble once it is full: the fill and the ends of the last call are all."""
    few, many = (Calls(name=name, num_ranks=2, num_microbatches=4).first(count) for count in (2, 10))
    assert simulate(many).bubble_share < simulate(few).bubble_share < 0.2
    assert simulate(many, StageCosts.uniform(2, update_s=1)).makespan_s > simulate(many).makespan_s


def test_calls_go_on_for_ever() -> None:
    calls = Calls(name="pipedream", num_ranks=4, num_microbatches=2)
    assert calls.actions(1000)[0][0] == Action(Kind.F, 0, 2000)
    assert calls.delay == 2
