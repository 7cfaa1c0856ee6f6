"""Smoothing and thinning: no lag, no lost spike, few points."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.series import smooth, smooth_width, thin

CURVES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=300)


@settings(max_examples=50)
@given(CURVES, st.integers(0, 20))
def test_smoothing_keeps_both_ends_and_stays_within_the_curve(values: list[float], width: int) -> None:
    smoothed = smooth(list(enumerate(values)), width=width)
    assert [x for x, _ in smoothed] == list(range(len(values)))
    assert smoothed[0][1] == pytest.approx(values[0], abs=1e-6)
    assert smoothed[-1][1] == pytest.approx(values[-1], abs=1e-6)
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in smoothed)


def test_smoothing_a_straight_line_changes_nothing() -> None:
    line = [(float(x), 3.0 * x) for x in range(50)]
    assert [y for _, y in smooth(line, width=5)] == pytest.approx([y for _, y in line])


def test_smoothing_is_the_mean_of_the_window() -> None:
    assert smooth([(1, 0.0), (2, 3.0), (3, 0.0), (4, 0.0), (5, 0.0)], width=1) == [
        (1, 0),
        (2, 1),
        (3, 1),
        (4, 0),
        (5, 0),
    ]


@settings(max_examples=50)
@given(CURVES, st.integers(4, 80))
def test_thinning_keeps_order_ends_and_extremes(values: list[float], limit: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    kept = thin(points, limit=limit)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert max(y for _, y in kept) == max(values)
    assert min(y for _, y in kept) == min(values)
    assert len(kept) <= limit + 3


def test_short_curves_are_left_alone() -> None:
    assert smooth_width(11) == 0
    assert smooth_width(200) == 5
    points = [(float(x), 1.0) for x in range(100)]
    assert thin(points, limit=100) is points
