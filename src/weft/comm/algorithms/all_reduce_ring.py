"""All-reduce by a ring: a reduce-scatter of N chunks, then an all-gather of their sums.

Sends: 2 S (N - 1) / N, whatever N. Steps: 2 (N - 1), each of S / N.
Order: chunk r is summed from rank r + 1 on, around the ring: (((r + 1) + (r + 2)) + ...) + r.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms import all_gather_ring, reduce_scatter_ring
from weft.comm.algorithms.rounds import CollectiveTask, Round


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    yield from reduce_scatter_ring.rounds(task, rank)
    yield from all_gather_ring.rounds(task, rank)
