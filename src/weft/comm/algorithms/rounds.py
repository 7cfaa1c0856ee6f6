"""`CollectiveTask` and the messages of a round: what an algorithm is given, and what it yields.

An algorithm is a pure function of (task, rank) that yields that rank's rounds; every rank yields equally many. In a
round a rank posts all its messages at once and then waits for them:

    Send(peer, span)             elements of the source, as they were before the round
    Receive(peer, span, adds)    into the target, in place of its elements or added to them, in the listed order

Source and target are the same buffer, except where `Algorithm.in_place` is false: there a rank may also send to itself.
Addresses are elements of the full tensor, on every rank alike; chunk r of `even_chunks` belongs to rank r.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class ElementRange(NamedTuple):
    """Elements from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: ElementRange) -> bool:
        return self.start < other.stop and other.start < self.stop and self.start < self.stop


class Send(NamedTuple):
    peer: int
    span: ElementRange


class Receive(NamedTuple):
    peer: int
    span: ElementRange
    adds: bool = False


Message = Send | Receive
Round = tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class CollectiveTask:
    """One collective: `count` elements of the full tensor over `num_ranks` ranks, `per_node` neighbours to a node."""

    num_ranks: int
    count: int
    root: int = 0
    per_node: int = 1

    @property
    def whole(self) -> ElementRange:
        return ElementRange(0, self.count)

    def chunk(self, rank: int) -> ElementRange:
        return even_chunks(self.whole, self.num_ranks)[rank % self.num_ranks]


Rounds = Callable[[CollectiveTask, int], Iterator[Round]]


def even_chunks(span: ElementRange, parts: int) -> list[ElementRange]:
    """`span` in contiguous chunks whose lengths differ by one element at most, the longer ones first."""
    length, longer = divmod(span.size, parts)
    starts = [span.start + index * length + min(index, longer) for index in range(parts + 1)]
    return [ElementRange(*pair) for pair in itertools.pairwise(starts)]


def circulate(chunks: list[ElementRange], members: list[int], place: int, *, first: int, adds: bool) -> Iterator[Round]:
    """A ring: at step k the member at `place` passes chunk (first + place - k) on and takes the one before it."""
    size = len(members)
    following, before = members[(place + 1) % size], members[place - 1]
    for step in range(size - 1):
        sent, received = chunks[(first + place - step) % size], chunks[(first + place - step - 1) % size]
        yield (Send(following, sent), Receive(before, received, adds))
