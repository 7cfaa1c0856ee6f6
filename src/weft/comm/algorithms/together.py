"""Runs an algorithm for all ranks at once in this process, without a network: the meaning of rounds.

Buffers are anything with slices (lists, arrays, tensors). A message is copied when it is sent; a round's messages
between two ranks match in their order. A round that does not match raises `MismatchError`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from weft.comm.algorithms.registry import Algorithm
from weft.comm.algorithms.rounds import CollectiveTask, ElementRange, Receive, Round, Send

Add = Callable[[Any, Any], Any]  # (a rank's own elements, those that arrived)


class MismatchError(ValueError):
    """A round of an algorithm in which sends and receives do not match, or overwrite one another."""


class Carried(NamedTuple):
    """A message with both of its ends."""

    source: int
    target: int
    sent: ElementRange
    received: ElementRange
    adds: bool


@dataclass(frozen=True)
class Traced:
    """All ranks' buffers after each round, beginning with those before the first."""

    transfers: tuple[tuple[Carried, ...], ...]
    buffers: tuple[Any, ...]


def transfers_of(algorithm: Algorithm, task: CollectiveTask) -> Iterator[tuple[Carried, ...]]:
    """Per round all messages, in the order in which their receivers list them."""
    every = [algorithm.rounds(task, rank) for rank in range(task.num_ranks)]
    for number, together in enumerate(zip_longest(*every)):
        if any(one is None for one in together):
            raise MismatchError(f"{algorithm.name}: ranks differ in the number of rounds, from round {number} on")
        yield _matched(algorithm, together)


def run_together(algorithm: Algorithm, task: CollectiveTask, sources: Sequence[Any], *, add: Add) -> list[Any]:
    """The targets of all ranks, given their sources (which stay as they are)."""
    targets = [deepcopy(source) for source in sources]
    if algorithm.in_place:
        sources = targets
    for transfers in transfers_of(algorithm, task):
        apply_round(transfers, sources, targets, add=add)
    return targets


def apply_round(transfers: Sequence[Carried], sources: Sequence[Any], targets: Sequence[Any], *, add: Add) -> None:
    carried = [deepcopy(sources[one.source][one.sent.start : one.sent.stop]) for one in transfers]
    for one, values in zip(transfers, carried, strict=True):
        target, place = targets[one.target], slice(*one.received)
        target[place] = add(target[place], values) if one.adds else values


def _matched(algorithm: Algorithm, together: Sequence[Round]) -> tuple[Carried, ...]:
    waiting: dict[tuple[int, int], deque[ElementRange]] = defaultdict(deque)
    for rank, messages in enumerate(together):
        for message in messages:
            if isinstance(message, Send):
                waiting[rank, message.peer].append(message.span)
    found = []
    for rank, messages in enumerate(together):
        _require_apart(algorithm, rank, messages)
        for message in messages:
            if isinstance(message, Receive):
                sent = waiting[message.peer, rank]
                if not sent or sent[0].size != message.span.size:
                    raise MismatchError(f"{algorithm.name}: rank {rank} receives {message.span} that was never sent")
                found.append(Carried(message.peer, rank, sent.popleft(), message.span, message.adds))
    if any(waiting.values()):
        raise MismatchError(f"{algorithm.name}: a message is never received")
    return tuple(found)


def _require_apart(algorithm: Algorithm, rank: int, messages: Round) -> None:
    """Received elements must not replace those that the round still sends."""
    written = [one.span for one in messages if isinstance(one, Receive) and not one.adds]
    sent = [one.span for one in messages if isinstance(one, Send)] if algorithm.in_place else []
    if any(a.overlaps(b) for a in written for b in sent):
        raise MismatchError(f"{algorithm.name}: rank {rank} overwrites what it sends")
