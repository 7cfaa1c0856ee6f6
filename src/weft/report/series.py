"""Numbers of a curve made fit to draw: smoothing, and thinning that keeps every spike. Pure functions on lists.

Smoothing is a centred mean over i-h .. i+h with h = min(width, i, n-1-i): no lag, and both ends are the true values.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

MAX_POINTS = 2_000

Points = list[tuple[float, float]]


class Numbered(Protocol):
    """One step of a run, whatever kind of run it is."""

    @property
    def step(self) -> int: ...


def smooth_width(num_points: int) -> int:
    """Half of the smoothing window; 0 where the curve is too short to need one."""
    return 0 if num_points < 12 else max(3, num_points // 40)


def smooth(points: Points, *, width: int) -> Points:
    """The centred mean of the ys, `width` points to either side."""
    sums = [0.0, *accumulate(y for _, y in points)]
    last = len(points) - 1
    result = []
    for index, (x, _) in enumerate(points):
        reach = min(width, index, last - index)
        total = sums[index + reach + 1] - sums[index - reach]
        result.append((x, total / (2 * reach + 1)))
    return result


def thin(points: Points, *, limit: int = MAX_POINTS) -> Points:
    """At most about `limit` of the points, in order: each bucket's lowest and highest, and both ends of the curve."""
    if len(points) <= limit:
        return points
    size = -(-2 * len(points) // limit)
    kept: Points = [points[0]]
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        extremes = {min(bucket, key=lambda point: point[1]), max(bucket, key=lambda point: point[1])}
        kept += sorted(extremes - {points[0], points[-1]})
    return [*kept, points[-1]]
