"""Thinned curves keep every extreme of a pixel column, both ends, and nothing that was not there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.ui.thinning import thin_curve

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf")])


@given(ys=st.lists(VALUES, max_size=300), width=st.integers(1, 40), seed=st.integers(0, 9))
def test_extremes_of_every_column_are_kept(ys: list[float], width: int, seed: int) -> None:
    x = np.cumsum(np.random.default_rng(seed).integers(0, 5, len(ys))).astype(float)
    y = np.array(ys, dtype=float)
    thinned = thin_curve(x, y, width=width)
    finite = [(one, value) for one, value in zip(x, y, strict=True) if np.isfinite(value)]
    assert set(zip(thinned.x, thinned.y, strict=True)) <= set(finite)
    assert np.all(np.diff(thinned.x) >= 0)
    if not finite:
        return
    assert len(thinned.x) <= 2 * width + 2
    assert (thinned.x[0], thinned.y[0]) == finite[0]
    assert (thinned.x[-1], thinned.y[-1]) == finite[-1]
    span = (finite[-1][0] - finite[0][0]) or 1.0
    for column in range(width):
        inside = [value for one, value in finite if min(int((one - finite[0][0]) / span * width), width - 1) == column]
        if inside:
            assert min(inside) in thinned.y
            assert max(inside) in thinned.y


def test_means_are_those_of_the_columns() -> None:
    thinned = thin_curve(np.arange(100.0), np.tile([1.0, 3.0], 50), width=10)
    assert thinned.mean_y.tolist() == [2.0] * 10
    assert np.all(np.diff(thinned.mean_x) > 0)


def test_a_logarithmic_axis_has_its_own_columns_and_no_zero() -> None:
    x = np.arange(0.0, 10_000)
    thinned = thin_curve(x, x, width=40, is_log=True)
    assert thinned.x[0] == 1
    assert np.sum(thinned.x < 100) > 20  # half of the axis, not a hundredth of it
