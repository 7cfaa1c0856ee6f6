"""Activations and gradients between stages: sent at once, received in the order in which the sender sends.

Two ranks may exchange messages of several stages in both directions, and a wire has no labels (NCCL's has none). So the
order is taken from the schedule: what a rank sends to another follows from its actions; the receiver takes messages in
just that order, and keeps the ones it does not need yet. Each direction has a group of its own, since two ranks that
both begin with a send would wait for each other on one.

The shape of what a stage gives is told once, in front of the first message, for each shape of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.schedule import Action, Kind

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER_NUMBERS = 8
ShapeKey = tuple[int, ...]  # the shape of a micro-batch's rows


class Message(NamedTuple):
    """An activation for the forward of `stage`, or a gradient for its backward."""

    way: Literal["forward", "backward"]
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True)
class StageLinks:
    """One pipeline: the global rank at every place, and the groups of its two directions."""

    ranks: tuple[int, ...]
    place: int
    down: dist.ProcessGroup  # to higher places
    up: dist.ProcessGroup
    ahead: int = 0  # messages that are asked for before they are needed

    def group(self, *, source: int, target: int) -> dist.ProcessGroup:
        return self.down if source < target else self.up


def sent_by(actions: Iterable[Action], stage_to_rank: Sequence[int]) -> Iterator[tuple[int, Message]]:
    """(to which place, what) for every message of a rank's actions, in order; none to itself."""
    for action in actions:
        message = _made_by(action, len(stage_to_rank) - 1)
        if message is not None and stage_to_rank[message.stage] != stage_to_rank[action.stage]:
            yield stage_to_rank[message.stage], message


def _made_by(action: Action, last: int) -> Message | None:
    if action.kind is Kind.F and action.stage < last:
        return Message("forward", action.stage + 1, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return Message("backward", action.stage - 1, action.microbatch)
    return None


def _needed_by(action: Action, last: int) -> Message | None:
    if action.kind is Kind.F and action.stage > 0:
        return Message("forward", action.stage, action.microbatch)
    if action.kind in (Kind.B, Kind.I) and action.stage < last:
        return Message("backward", action.stage, action.microbatch)
    return None


class _Sent(NamedTuple):
    """A message on its way: its memory is not to be touched."""

    message: Message
    work: Any
    tensor: Tensor


class P2PExchange:
    """Walks over a schedule's actions: every message is sent and received once.

    Gloo tells that a message has left only to who waits for it. But who hears of a rank's later action knows that the
    rank has taken what its earlier ones needed: then nobody waits, and the memory is let go.
    """

    def __init__(self, links: StageLinks, stage_to_rank: Sequence[int], known_shapes: ShapeRegistry) -> None:
        self._links, self._placement, self._known_shapes = links, stage_to_rank, known_shapes
        self._shapes: dict[int, ShapeKey] = {}
        self._num_known = [0] * len(links.ranks)  # actions of every rank
        self._expected: dict[int, deque[tuple[Message, int]]] = defaultdict(deque)  # with the action that makes it
        self._taken_at: dict[Message, int] = {}  # by the receiver's action, of messages that this rank sends
        self._arriving: dict[Message, tuple[Any, Tensor, int]] = {}
        self._at_hand: dict[Message, Tensor] = {}
        self._leaving: dict[int, list[_Sent]] = defaultdict(list)  # by place

    def expect(self, actions: Sequence[Sequence[Action]], shapes: Mapping[int, ShapeKey]) -> None:
        """What all ranks are going to do; `shapes`, by micro-batch, of those whose forwards are among it."""
        self._shapes.update(shapes)
        last = len(self._placement) - 1
        for rank, own in enumerate(actions):
            for number, action in enumerate(own, start=self._num_known[rank]) if rank != self._links.place else ():
                made, needed = _made_by(action, last), _needed_by(action, last)
                if made is not None and self._placement[made.stage] == self._links.place:
                    self._expected[rank].append((made, number))
                if needed is not None and self._sender(needed) == self._links.place:
                    self._taken_at[needed] = number
            self._num_known[rank] += len(own)

    def shape_of(self, microbatch: int) -> ShapeKey:
        return self._shapes[microbatch]

    def forget(self, microbatch: int) -> None:
        """Nothing more will come of this one."""
        self._shapes.pop(microbatch, None)

    def send(self, message: Message, tensor: Tensor) -> None:
        target = self._placement[message.stage]
        if target == self._links.place:
            self._at_hand[message] = tensor
            return
        group, rank = self._links.group(source=self._links.place, target=target), self._links.ranks[target]
        tensor, leaving = tensor.contiguous(), self._leaving[target]
        if message.way == "forward" and self._known_shapes.is_new(message.stage, self._shapes[message.microbatch]):
            header = _header(tensor)
            leaving.append(_Sent(message, dist.isend(header, rank, group=group), header))
        leaving.append(_Sent(message, dist.isend(tensor, rank, group=group), tensor))
        while leaving and has_left(leaving[0].work):
            leaving.pop(0)

    def receive(self, message: Message, *, device: torch.device) -> Tensor:
        if message in self._at_hand:
            return self._at_hand.pop(message)
        source = self._sender(message)
        while message not in self._arriving:
            self._post(source, device=device)
        for _ in range(self._links.ahead):  # who posts late, waits for the whole way
            if self._can_post(source):
                self._post(source, device=device)
        work, tensor, made_at = self._arriving.pop(message)
        work.wait()
        self._let_go(source, before=made_at)
        return tensor

    def finish(self) -> None:
        """Everything has left, and everything that was expected has come."""
        for sent in (one for leaving in self._leaving.values() for one in leaving):
            sent.work.wait()
        self._leaving.clear()
        if self._arriving or self._at_hand or any(self._expected.values()):
            raise RuntimeError("the pipeline ended with messages that nobody took")

    def _let_go(self, place: int, *, before: int) -> None:
        """What the rank at `place` took before its action `before`."""
        is_taken = {one.message: self._taken_at.get(one.message, before + 1) <= before for one in self._leaving[place]}
        for sent in (one for one in self._leaving[place] if is_taken[one.message]):
            sent.work.wait()
            self._taken_at.pop(sent.message, None)
        self._leaving[place] = [one for one in self._leaving[place] if not is_taken[one.message]]

    def _sender(self, message: Message) -> int:
        return self._placement[message.stage + (-1 if message.way == "forward" else 1)]

    def _can_post(self, source: int) -> bool:
        """Whether the next message from there is known, and its shape, so that asking for it waits for nothing."""
        if not self._expected[source]:
            return False
        message, _ = self._expected[source][0]
        if message in self._arriving or len(self._arriving) > self._links.ahead:
            return False
        known = self._known_shapes.given if message.way == "backward" else self._known_shapes.taken
        return (message.stage, self._shapes.get(message.microbatch)) in known

    def _post(self, source: int, *, device: torch.device) -> None:
        """Ask for the next message from `source`."""
        message, made_at = self._expected[source].popleft()
        shape_key = self._shapes[message.microbatch]
        group = self._links.group(source=source, target=self._links.place)
        rank = self._links.ranks[source]
        if message.way == "backward":
            shape, dtype = self._known_shapes.given[message.stage, shape_key]
        elif self._known_shapes.is_new(message.stage, shape_key):
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=device)
            dist.recv(header, rank, group=group)
            shape, dtype = self._known_shapes.taken[message.stage, shape_key] = _read(header)
        else:
            shape, dtype = self._known_shapes.taken[message.stage, shape_key]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self._arriving[message] = (dist.irecv(tensor, rank, group=group), tensor, made_at)


def has_left(work: Any) -> bool:
    """Whether a message's memory is free again. In a dry run, where no message ever leaves, it has at once."""
    return bool(work.is_completed())


class ShapeRegistry:
    """Shapes that are known, for the life of an engine: (stage, shape of the micro-batch) -> (shape, dtype)."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, ShapeKey], tuple[tuple[int, ...], torch.dtype]] = {}
        self.taken: dict[tuple[int, ShapeKey], tuple[tuple[int, ...], torch.dtype]] = {}
        self._told: set[tuple[int, ShapeKey]] = set()

    def expect(self, stage: int, shape_key: ShapeKey, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """What will come to `stage`, said beforehand: nobody waits for a header then."""
        self.taken[stage, shape_key] = (shape, dtype)
        self._told.add((stage, shape_key))

    def is_new(self, stage: int, shape_key: ShapeKey) -> bool:
        """Whether the input of `stage` has not been told yet; it has, from now on."""
        is_new = (stage, shape_key) not in self._told
        self._told.add((stage, shape_key))
        return is_new


def _header(tensor: Tensor) -> Tensor:
    numbers = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(numbers + [0] * (HEADER_NUMBERS - len(numbers)), dtype=torch.int64, device=tensor.device)


def _read(header: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    dtype, ndim, *sizes = header.tolist()
    return tuple(sizes[:ndim]), DTYPES[dtype]
