"""Which positions of a row each context-parallel rank has. Engine, planner and report share it. No torch.

`zigzag`: of 2c pieces, rank r has r and 2c - 1 - r, so causal attention is the same work on every rank.
`contiguous`: rank r has the r-th of c pieces; the last rank has almost twice the average work of causal attention.

The pieces of g neighbouring ranks are neighbours too: together they are those of one rank of c / g, in both splits. So
ranks that exchange heads, and then have the positions of all of them, need no split of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

SequenceSplit = Literal["zigzag", "contiguous"]


def padded_length(length: int, *, degree: int, split: SequenceSplit, multiple: int = 1) -> int:
    """The length that the ranks divide; each rank's positions are a multiple of `multiple`."""
    unit = math.lcm(degree * (2 if split == "zigzag" else 1), degree * multiple)
    return -(-length // unit) * unit


def piece_order(degree: int, split: SequenceSplit) -> tuple[tuple[int, ...], ...]:
    """The pieces of each rank: numbers in the order of the row."""
    if split == "zigzag":
        return tuple((rank, 2 * degree - 1 - rank) for rank in range(degree))
    return tuple((rank,) for rank in range(degree))


def spans_of(padded: int, *, degree: int, rank: int, split: SequenceSplit) -> tuple[range, ...]:
    """The positions of a rank, piece by piece."""
    pieces = piece_order(degree, split)
    size = padded // (degree * len(pieces[rank]))
    return tuple(range(piece * size, (piece + 1) * size) for piece in pieces[rank])


def attention_pairs(spans: tuple[range, ...], *, length: int, window: int | None = None) -> int:
    """Pairs of a query in `spans` and a key that causal attention multiplies, over positions below `length`."""
    reach = window or length

    def below(queries: int) -> int:
        few = min(queries, reach)
        return few * (few + 1) // 2 + (queries - few) * reach

    return sum(below(min(span.stop, length)) - below(min(span.start, length)) for span in spans)


def pairs_by_rank(length: int, *, degree: int, split: SequenceSplit, window: int | None = None) -> list[int]:
    padded = padded_length(length, degree=degree, split=split)
    return [
        attention_pairs(spans_of(padded, degree=degree, rank=rank, split=split), length=length, window=window)
        for rank in range(degree)
    ]


def work_over_mean(
    length: int, *, degree: int, split: SequenceSplit, group: int = 1, windows: Sequence[int | None] = (None,)
) -> list[float]:
    """Each rank's pairs over the mean of the ranks, of layers with these windows; `group` neighbours share theirs, each
    with a part of the heads."""
    totals = [0] * degree
    for window in sorted(set(windows), key=str):
        pairs = pairs_by_rank(length, degree=degree, split=split, window=window)
        totals = [total + windows.count(window) * each for total, each in zip(totals, pairs, strict=True)]
    shared = [sum(totals[rank // group * group :][:group]) / group for rank in range(degree)]
    return [total * degree / sum(totals) for total in shared]
