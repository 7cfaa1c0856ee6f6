"""Bytes and seconds of an algorithm, from its messages: counts, and a simulation on alpha-beta links.

A card sends one message at a time and receives one at a time, both at once. A message of b bytes occupies the sender's
and the receiver's card for b / bytes_per_s and arrives a latency later. A rank begins a round when its messages of the
round before have left and arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from weft.comm.algorithms.registry import Algorithm
from weft.comm.algorithms.rounds import CollectiveTask, Receive, Send
from weft.comm.algorithms.together import transfers_of
from weft.core.cluster import Link


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Elements and messages per rank, and rounds. Messages of a rank to itself, and empty ones, do not count."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]
    num_rounds: int

    @property
    def most_sent(self) -> int:
        return max(self.sent)


def count(algorithm: Algorithm, task: CollectiveTask) -> Counted:
    sent, received, messages, num_rounds = [], [], [], 0
    for rank in range(task.num_ranks):
        rounds = list(algorithm.rounds(task, rank))
        others = [one for messages in rounds for one in messages if one.peer != rank and one.span.size]
        sends = [one.span.size for one in others if isinstance(one, Send)]
        sent.append(sum(sends))
        messages.append(len(sends))
        received.append(sum(one.span.size for one in others if isinstance(one, Receive)))
        num_rounds = max(num_rounds, len(rounds))
    return Counted(sent=tuple(sent), received=tuple(received), messages=tuple(messages), num_rounds=num_rounds)


def predicted_bytes(algorithm: Algorithm, task: CollectiveTask, *, itemsize: int) -> Fraction:
    """The closed form of what the busiest rank sends."""
    return algorithm.sent(task.num_ranks, task.per_node) * task.count * itemsize


def predicted_seconds(
    algorithm: Algorithm, task: CollectiveTask, *, itemsize: int, inside: Link, between: Link
) -> float:
    """The closed form of the time: steps x latency + bytes on the slowest path / bandwidth."""
    paths = zip(algorithm.path(task.num_ranks, task.per_node), (inside, between), strict=True)
    return sum(
        path.steps * link.latency_s + float(path.share) * task.count * itemsize / link.bytes_per_s
        for path, link in paths
    )


def simulate(algorithm: Algorithm, task: CollectiveTask, *, itemsize: int, link: Callable[[int, int], Link]) -> float:
    """Seconds until the last rank is done; `link` gives the link from one rank to another."""
    ready = [0.0] * task.num_ranks
    out, into = list(ready), list(ready)  # when each rank's card is free
    for transfers in transfers_of(algorithm, task):
        ends = list(ready)
        for one in sorted(transfers, key=lambda one: (one.target - one.source) % task.num_ranks):  # nearest first
            if one.source == one.target or not one.sent.size:
                continue
            wire = link(one.source, one.target)
            start_s = max(ready[one.source], ready[one.target], out[one.source], into[one.target])
            free_s = start_s + one.sent.size * itemsize / wire.bytes_per_s
            out[one.source] = into[one.target] = free_s
            ends[one.source] = max(ends[one.source], free_s)
            ends[one.target] = max(ends[one.target], free_s + wire.latency_s)
        ready = ends
    return max(ready)
