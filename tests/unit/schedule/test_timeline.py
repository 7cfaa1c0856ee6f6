"""The shares a timeline reports, on times written by hand as a measured run would bring them."""

from __future__ import annotations

import pytest

from weft.schedule import Timeline, generate

MEASURED = Timeline(  # a clock that does not begin at 0; rank 1 starts 1 s later and ends 2 s earlier
    schedule=generate("gpipe", num_ranks=2, num_microbatches=1),
    starts=((100.0, 106.0), (101.0, 103.0)),
    ends=((101.0, 108.0), (102.0, 106.0)),
)


def test_shares_of_a_measured_run() -> None:
    assert MEASURED.origin_s == 100
    assert MEASURED.makespan_s == 8
    assert MEASURED.busy_s == (3, 4)
    assert MEASURED.idle_s == 9
    assert MEASURED.bubble_share == 9 / 16
    assert MEASURED.bubble_share_by_rank == (5 / 8, 4 / 8)


def test_events_carry_rank_action_and_times() -> None:
    assert [(e.rank, str(e.action), e.start_s, e.end_s) for e in MEASURED.events()] == [
        (0, "0F0", 100, 101),
        (0, "0B0", 106, 108),
        (1, "1F0", 101, 102),
        (1, "1B0", 103, 106),
    ]


def test_a_clock_of_a_long_day_loses_no_precision() -> None:
    """Sums of seconds since 1970 would: 2,000 actions of 1 us each are 2 ms of work, to a part in a thousand."""
    schedule = generate("gpipe", num_ranks=1, num_microbatches=1000)
    origin = 1.8e9
    times = [tuple(origin + (step + late) * 2**-19 for step in range(2000)) for late in (0, 0.5)]
    timeline = Timeline(schedule=schedule, starts=(times[0],), ends=(times[1],))
    assert timeline.busy_s[0] == pytest.approx(2000 * 2**-20, rel=1e-3)
