"""All-reduce without cooperation: every rank sends everything to every rank, and each sums for itself.

Not in place: a rank's own tensor is a term of the sum in its place, so that all ranks sum in the same order.
Sends: S (N - 1). Steps: 1, of S (N - 1). Order: rank order, ((0 + 1) + 2) + 3 ...
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    everyone = range(task.num_ranks)
    sends = tuple(Send((rank + step) % task.num_ranks, task.whole) for step in everyone)
    yield (*sends, *(Receive(peer, task.whole, adds=peer > 0) for peer in everyone))
