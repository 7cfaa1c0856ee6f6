"""Curves thinned to the pixels of a chart: the lowest and the highest value of every pixel column, and its mean.

Pure functions on arrays. x does not decrease; a y that is not finite is a gap and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indexes = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """`x`, `y`: kept points. `mean_x`, `mean_y`: one mean per pixel column."""

    x: Floats
    y: Floats
    mean_x: Floats
    mean_y: Floats


def thin_curve(x: Floats, y: Floats, *, width: int, is_log: bool = False) -> Thinned:
    """The curve in at most 2 * width + 2 points and `width` means; `is_log`: pixel columns of a logarithmic x axis."""
    is_drawn = np.isfinite(y) & ((x > 0) if is_log else np.isfinite(x))
    x, y = x[is_drawn], y[is_drawn]
    if len(x) <= width:
        return Thinned(x=x, y=y, mean_x=x, mean_y=y)
    starts = _column_starts(np.log(x) if is_log else x, width=width)
    kept = _extremes(y, starts)
    sizes = np.diff(np.append(starts, len(x)))
    means = (np.add.reduceat(values, starts) / sizes for values in (x, y))
    return Thinned(x=x[kept], y=y[kept], **dict(zip(("mean_x", "mean_y"), means, strict=True)))


def _column_starts(x: Floats, *, width: int) -> Indexes:
    """The index of the first point in each pixel column that has points."""
    span = x[-1] - x[0]
    if span <= 0:
        return np.zeros(1, dtype=np.intp)
    columns = np.minimum(((x - x[0]) / span * width).astype(np.intp), width - 1)
    return np.flatnonzero(np.diff(columns, prepend=-1) > 0)


def _extremes(y: Floats, starts: Indexes) -> Indexes:
    """Indexes of the first lowest and first highest value of each column, and of both ends of the curve, in order."""
    sizes = np.diff(np.append(starts, len(y)))
    places = np.repeat(np.arange(len(starts)), sizes)
    kept = [np.array([0, len(y) - 1])]
    for limit in (np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)):
        found = np.flatnonzero(y == limit[places])
        kept.append(found[np.unique(places[found], return_index=True)[1]])
    return np.unique(np.concatenate(kept))
