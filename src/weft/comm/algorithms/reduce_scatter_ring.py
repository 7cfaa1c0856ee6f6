"""Reduce-scatter by a ring: partial sums of chunks go round, and chunk r ends at rank r.

Sends: S (N - 1) / N. Steps: N - 1, each of S / N. Other chunks end with partial sums.
Order: chunk r is summed from rank r + 1 on, around the ring: (((r + 1) + (r + 2)) + ...) + r.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Round, circulate, even_chunks


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    members = list(range(task.num_ranks))
    yield from circulate(even_chunks(task.whole, task.num_ranks), members, rank, first=-1, adds=True)
