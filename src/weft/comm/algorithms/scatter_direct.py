"""Scatter: the root sends every rank its chunk. Sends: the root S (N - 1) / N. One step. Nothing is summed."""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, Receive, Round, Send


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    if rank == task.root:
        yield tuple(Send(peer, task.chunk(peer)) for peer in range(task.num_ranks) if peer != rank)
    else:
        yield (Receive(task.root, task.chunk(rank)),)
