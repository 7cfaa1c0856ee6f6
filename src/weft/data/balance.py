"""Balance: an order of the rows of a global batch in which contiguous parts of it have nearly equal attention work.

The work of a row is the sum of the squared lengths of its documents. Ranks and micro-batches take contiguous parts of
the batch, so one order, a function of the rows' work alone, serves every layout: from the heaviest to the lightest,
rows are dealt in pairs to two groups, the heavier row to the lighter group, and each group again. With R the largest
work of a row less the smallest, the two groups of an even number of rows differ by at most R, and all groups of one
level by at most 2 R: half the difference of the level above, and R.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def work_of(lengths: NDArray[np.int64]) -> int:
    """Attention work of documents of these lengths, in pairs of a query and a key without the causal mask."""
    return int((lengths * lengths).sum())


def balanced_order(work: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the rows in their new order; rows of equal work alone keep theirs."""
    if (work == work[0]).all():
        return np.arange(len(work))
    heaviest_first = np.argsort(-work, kind="stable")
    spread = _spread(list(range(len(work))), work[heaviest_first].tolist())
    return heaviest_first[np.array(spread, dtype=np.int64)]


def largest_part(work: NDArray[np.int64], *, parts: int) -> float:
    """The work of the busiest of equal contiguous parts, over their mean."""
    sums = work.reshape(parts, -1).sum(axis=1)
    return float(sums.max() / sums.mean())


def _spread(rows: list[int], work: list[int]) -> list[int]:
    """`rows`: numbers in the order from heavy to light, ascending."""
    if len(rows) < 3:
        return rows
    first, second = _groups(rows, work)
    return _spread(first, work) + _spread(second, work)


def _groups(rows: list[int], work: list[int]) -> tuple[list[int], list[int]]:
    """Two groups of nearly equal work; of an odd number, the first also has the median row."""
    middle = len(rows) // 2
    even = rows if len(rows) % 2 == 0 else rows[:middle] + rows[middle + 1 :]
    first, second, lead = [], [], 0  # lead: work of the first less that of the second
    for pair in zip(even[::2], even[1::2], strict=True):
        to_first, to_second = pair if lead <= 0 else pair[::-1]
        first.append(to_first)
        second.append(to_second)
        lead += work[to_first] - work[to_second]
    return (first if even is rows else sorted([*first, rows[middle]])), second
