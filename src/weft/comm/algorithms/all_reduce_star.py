"""All-reduce through one rank, as a parameter server does: everybody sends to the root, the root sends the sum back.

Sends: the root S (N - 1), and receives as much; others S. Steps: 2, each of S (N - 1) through the root's card.
Order: from the root on, in rank order: ((root + 0) + 1) + 2 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    if rank != task.root:
        yield (Send(task.root, task.whole),)
        yield (Receive(task.root, task.whole),)
        return
    others = [peer for peer in range(task.num_ranks) if peer != rank]
    yield tuple(Receive(peer, task.whole, adds=True) for peer in others)
    yield tuple(Send(peer, task.whole) for peer in others)
