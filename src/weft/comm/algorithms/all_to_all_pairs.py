"""All-to-all by pairs: at step k every rank sends to rank + k and receives from rank - k.

Not in place: chunk j of the source goes to rank j, whose target has the chunks of all ranks, in rank order.
Sends: S (N - 1) / N. Steps: N - 1, each of S / N. Nothing is summed.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, ElementRange, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    size, own = task.num_ranks, task.chunk(rank).size
    for step in range(size):
        peer, source = (rank + step) % size, (rank - step) % size
        yield (Send(peer, task.chunk(peer)), Receive(source, ElementRange(source * own, (source + 1) * own)))
