"""Broadcast by a binomial tree: in each round every rank that has the tensor sends it to one that does not.

Sends: the root S x ceil(log2 N), others less. Steps: ceil(log2 N), each of S. Nothing is summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    size, place = task.num_ranks, (rank - task.root) % task.num_ranks
    distance = 1 << (size - 1).bit_length()
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == 0 and place + distance < size:
            yield (Send((rank + distance) % size, task.whole),)
        elif place % (2 * distance) == distance:
            yield (Receive((rank - distance) % size, task.whole),)
        else:
            yield ()
