"""Reduce by a binomial tree: in each round half of the remaining ranks send their sum and are done.

Sends: every rank but the root S. Steps: ceil(log2 N), each of S. Buffers of other ranks end with partial sums.
Order: a rank adds the sum of the neighbouring subtree of 1, 2, 4 ... ranks to its own: ((0 + 1) + (2 + 3)) + (4 + 5).
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    size, place = task.num_ranks, (rank - task.root) % task.num_ranks
    distance = 1
    while distance < size:
        if place % (2 * distance) == distance:
            yield (Send((rank - distance) % size, task.whole),)
        elif place % (2 * distance) == 0 and place + distance < size:
            yield (Receive((rank + distance) % size, task.whole, adds=True),)
        else:
            yield ()
        distance *= 2
