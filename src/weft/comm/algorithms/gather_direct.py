"""Gather: every rank sends the root its chunk. Sends: S / N; the root receives S (N - 1) / N. One step, no sum."""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    if rank == task.root:
        yield tuple(Receive(peer, task.chunk(peer)) for peer in range(task.num_ranks) if peer != rank)
    else:
        yield (Send(task.root, task.chunk(rank)),)
