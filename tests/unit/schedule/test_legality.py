"""Everything the generators write is legal; every way to break a schedule is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from asked import Asked, all_requests, requests
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import PlanError
from weft.schedule import NAMES, Action, Schedule, WeightRule, check_schedule, generate, simulate

PLAIN = generate("1f1b", num_ranks=2, num_microbatches=2)  # 0F0,0F1,0B0,0B1 | 1F0,1B0,1F1,1B1


def with_rank(schedule: Schedule, rank: int, text: str) -> Schedule:
    """`schedule` with another order on one rank."""
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(map(Action.parse, text.split()))
    return replace(schedule, ranks=tuple(ranks))


@pytest.mark.parametrize("name", NAMES)
def test_every_small_schedule_is_legal(name: str) -> None:
    asked = all_requests(name, most_stages=3)
    assert len(asked) > 50
    assert [(one, reasons) for one in asked if (reasons := check_schedule(one.schedule))] == []


@settings(max_examples=60)
@given(requests())
def test_larger_schedules_are_legal(asked: Asked) -> None:
    assert check_schedule(asked.schedule) == []


@pytest.mark.parametrize(
    ("rank", "order", "reason"),
    [
        (0, "0F0 0B0 0B1", "stage 0 never runs the forward of micro-batch 1"),
        (0, "0F0 0F1 0B0", "stage 0 runs the backward of micro-batch 1 as nothing"),
        (0, "0F0 0F1 0I0 0B1", "stage 0 runs the backward of micro-batch 0 as I: needs B, or I and W"),
        (0, "0F0 0F1 0B0 0W0 0B1", "runs the backward of micro-batch 0 as B+W"),
        (0, "0F0 0F1 0F1 0B0 0B1", "0F1 occurs 2 times"),
        (0, "0B0 0F0 0F1 0B1", "rank 0 has 0B0 before 0F0"),
        (0, "0F0 0F1 0W0 0I0 0B1", "rank 0 has 0W0 before 0I0"),
        (0, "0F0 0B0 0F1 0B1 1F0", "rank 0 has 1F0, whose stage is on rank 1"),
        (0, "0F0 0F1 0B0 0B1 0F2 0B2", "rank 0 has 0F2, whose stage or micro-batch does not exist"),
        (1, "1F0 1F1 1B1 1B0 2F0", "rank 1 has 2F0, whose stage or micro-batch does not exist"),
        (0, "0F0 0F1 0B0 0B1 0U1", "stage 0 updates after micro-batches [1], its weight rule requires []"),
    ],
)
def test_every_break_has_its_reason(rank: int, order: str, reason: str) -> None:
    assert any(reason in found for found in check_schedule(with_rank(PLAIN, rank, order)))


def test_two_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    crossed = with_rank(PLAIN, 0, "0F0 0B0 0F1 0B1")
    crossed = with_rank(crossed, 1, "1F0 1F1 1B0 1B1")
    assert check_schedule(crossed) == [
        "rank 0 is blocked at 0B0, waiting for the input gradient of stage 1, micro-batch 0",
        "rank 1 is blocked at 1F1, waiting for F of stage 0, micro-batch 1",
    ]
    with pytest.raises(PlanError, match="1f1b deadlocks: rank"):
        simulate(crossed)


def test_a_weight_backward_cannot_run_before_its_input_backward() -> None:
    split = generate("zero_bubble", num_ranks=1, num_microbatches=1)
    with pytest.raises(PlanError, match="at 0W0, waiting for the input gradient of stage 0"):
        simulate(with_rank(split, 0, "0F0 0W0 0I0"))


@settings(max_examples=150)
@given(requests(), st.data())
def test_no_action_can_be_dropped_or_doubled(asked: Asked, data: st.DataObject) -> None:
    schedule = asked.schedule
    rank = data.draw(st.integers(0, asked.p - 1))
    at = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
    own = schedule.ranks[rank]
    for broken in (own[:at] + own[at + 1 :], own[: at + 1] + own[at:]):
        ranks = (*schedule.ranks[:rank], broken, *schedule.ranks[rank + 1 :])
        assert check_schedule(replace(schedule, ranks=ranks))


def test_an_update_must_have_all_its_gradients_and_no_others() -> None:
    schedule = generate("pipedream", num_ranks=1, num_microbatches=2, num_steps=1)
    early = with_rank(schedule, 0, "0F0 0U0 0B0 0F1 0B1 0U1")
    assert "0U0 comes after the gradients of micro-batches []" in check_schedule(early)
    late = with_rank(schedule, 0, "0F0 0B0 0F1 0B1 0U0 0U1")
    assert "0U0 comes after the gradients of micro-batches [0, 1]" in check_schedule(late)


def test_weights_must_be_made_before_they_are_read() -> None:
    """2BW with fewer micro-batches than the pipeline holds would read a version of the future."""
    schedule = generate("pipedream", num_ranks=3, num_microbatches=1, num_steps=6)
    wrong = replace(schedule, weight_rule=WeightRule.DOUBLE_BUFFER)
    assert "0F2 reads weight version 1, but the newest of the stage is 0" in check_schedule(wrong)


def test_shapes_that_do_not_fit_are_told_first() -> None:
    assert check_schedule(replace(PLAIN, num_ranks=3)) == ["3 ranks, but actions for 2"]
    assert check_schedule(replace(PLAIN, stage_to_rank=(0,))) == ["2 stages, but 1 are placed"]
    assert check_schedule(replace(PLAIN, stage_to_rank=(0, 5))) == ["a stage is placed on a rank outside 0 .. 1"]
