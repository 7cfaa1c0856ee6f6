"""Schedules print and parse back; placements are where the papers put the stages."""

from __future__ import annotations

import pytest
from asked import Asked, requests
from hypothesis import given, settings

from weft.core.errors import BadValueError
from weft.schedule import Schedule, WeightRule, generate
from weft.schedule.schedule import loop_placement, v_placement


@settings(max_examples=60)
@given(requests())
def test_the_printed_form_parses_back(asked: Asked) -> None:
    assert Schedule.parse(asked.schedule.to_text()) == asked.schedule


def test_the_printed_form_is_short_to_read() -> None:
    assert generate("1f1b", num_ranks=2, num_microbatches=2).to_text() == (
        "schedule=1f1b ranks=2 stages=2 microbatches=2 steps=1 weights=flush placement=0-1\n"
        "0F0,0F1,0B0,0B1\n"
        "1F0,1B0,1F1,1B1\n"
    )


@pytest.mark.parametrize("text", ["", "nonsense", "schedule=x ranks=two", "schedule=x ranks=1\n0F0"])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(BadValueError, match="not a printed schedule"):
        Schedule.parse(text)


def test_loops_wrap_around_and_a_v_turns_back() -> None:
    assert loop_placement(num_ranks=3, num_stages=6) == (0, 1, 2, 0, 1, 2)
    assert v_placement(num_ranks=3, num_stages=6) == (0, 1, 2, 2, 1, 0)
    assert generate("zbv", num_ranks=2, num_microbatches=4, virtual_stages=2).rank_to_stages == ((0, 3), (1, 2))


def test_update_periods_follow_from_the_weight_rule() -> None:
    periods = {
        name: generate(name, num_ranks=2, num_microbatches=4).update_period
        for name in ("1f1b", "pipedream", "pipedream_2bw")
    }
    assert periods == {"1f1b": 0, "pipedream": 1, "pipedream_2bw": 4}
    assert generate("pipedream", num_ranks=2, num_microbatches=4).weight_rule is WeightRule.STASH
