"""The yardstick of a series: what rounding does never gets less from one step to the next."""

from __future__ import annotations

import math

import pytest

from weft.verify.checks import check_scalars
from weft.verify.tolerances import envelope


def test_where_curves_cross_the_earlier_distance_counts() -> None:
    distances = envelope([2.0, 4.0, 2.0], [2.002, 4.0, 2.0])
    assert distances == pytest.approx([0.002, 0.004, 0.002], rel=1e-3)


def test_an_overflow_does_not_widen_what_follows() -> None:
    distances = envelope([1.0, 1.0, 1.0], [1.0, math.inf, 1.0])
    assert distances[2] == 0.0


def test_a_chance_meeting_raises_no_alarm_and_a_real_error_does() -> None:
    truth, same = [2.0, 2.0, 2.0], [2.0, 2.0002, 2.0]
    assert check_scalars("norm", truth, same, [2.0, 2.0002, 2.0005], rule=2).ok
    assert not check_scalars("norm", truth, same, [2.0, 2.0002, 2.01], rule=2).ok
    assert not check_scalars("norm", truth, same, [2.0005, 2.0, 2.0], rule=2).ok  # nothing was measured before
