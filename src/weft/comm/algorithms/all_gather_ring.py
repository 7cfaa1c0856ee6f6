"""All-gather by a ring: every rank passes on the chunk that it received last, beginning with its own.

Sends: S (N - 1) / N. Steps: N - 1, each of S / N. Nothing is summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Round, circulate, even_chunks


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    members = list(range(task.num_ranks))
    yield from circulate(even_chunks(task.whole, task.num_ranks), members, rank, first=0, adds=False)
