"""The registry's names are the plan's; a request that cannot be gets its reason, one that can gets a schedule."""

from __future__ import annotations

from typing import get_args

import pytest

from weft.core.errors import PlanError
from weft.core.plan import Pipeline
from weft.schedule import NAMES, check_request, generate


def test_names_are_exactly_those_a_plan_may_hold() -> None:
    assert set(NAMES) == set(get_args(Pipeline.model_fields["schedule"].annotation))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "reason"),
    [
        ("1f1b", 4, 8, 2, "exactly 1 stage per rank, found 2"),
        ("zbv", 4, 8, 1, "exactly 2 stages per rank, found 1"),
        ("dualpipev", 4, 7, 2, "at least as many micro-batches as stages, 8, found 7"),
        ("interleaved_1f1b", 4, 9, 2, "in 2 rounds, and 2 does not divide 9"),
        ("pipedream_2bw", 4, 3, 1, "at least as many micro-batches as ranks, 4, found 3"),
        ("gpipe", 0, 3, 1, "num_ranks must be at least 1, found 0"),
        ("gpipe", 2, 0, 1, "num_microbatches must be at least 1"),
        ("looped_bfs", 2, 2, 0, "virtual_stages must be at least 1"),
    ],
)
def test_a_request_that_cannot_be_gets_one_sentence(name: str, p: int, m: int, v: int, reason: str) -> None:
    reasons = check_request(name, num_ranks=p, num_microbatches=m, virtual_stages=v)
    assert len(reasons) == 1
    assert reason in reasons[0]
    with pytest.raises(PlanError) as caught:
        generate(name, num_ranks=p, num_microbatches=m, virtual_stages=v)
    assert caught.value.message == reasons[0]


def test_only_schedules_that_never_drain_have_windows() -> None:
    assert check_request("1f1b", num_ranks=2, num_microbatches=2, num_steps=3) == [
        "1f1b drains after every step, so num_steps must be 1, found 3"
    ]
    assert generate("pipedream", num_ranks=2, num_microbatches=2, num_steps=3).window == 6


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(PlanError, match="no pipeline schedule 'zerobubble'") as caught:
        check_request("zerobubble", num_ranks=1, num_microbatches=1)
    assert caught.value.hint == "did you mean 'zero_bubble'?"
