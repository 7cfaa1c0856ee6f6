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
class Line:
    """One pipeline: the global rank at every place, and the groups of its two directions."""

    ranks: tuple[int, ...]
    place: int
    down: dist.ProcessGroup  # to higher places
    up: dist.ProcessGroup

    def group(self, *, source: int, target: int) -> dist.ProcessGroup:
        return self.down if source < target else self.up


def sent_by(actions: Iterable[Action], stage_to_rank: Sequence[int]) -> Iterator[tuple[int, Message]]:
    """(to which place, what) for every message of a rank's actions, in order; none to itself."""
    last = len(stage_to_rank) - 1
    for action in actions:
        own = stage_to_rank[action.stage]
        if action.kind is Kind.F and action.stage < last:
            message = Message("forward", action.stage + 1, action.microbatch)
        elif action.kind in (Kind.B, Kind.I) and action.stage > 0:
            message = Message("backward", action.stage - 1, action.microbatch)
        else:
            continue
        if stage_to_rank[message.stage] != own:
            yield stage_to_rank[message.stage], message


class Mail:
    """Walks over a schedule's actions: every message is sent and received once."""

    def __init__(self, line: Line, stage_to_rank: Sequence[int], book: Book) -> None:
        self._line, self._placement, self._book = line, stage_to_rank, book
        self._shapes: dict[int, ShapeKey] = {}
        self._expected: dict[int, deque[Message]] = defaultdict(deque)
        self._arriving: dict[Message, tuple[Any, Tensor]] = {}
        self._at_hand: dict[Message, Tensor] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()

    def expect(self, actions: Sequence[Sequence[Action]], shapes: Mapping[int, ShapeKey]) -> None:
        """What all ranks are going to do; `shapes`, by micro-batch, of those whose forwards are among it."""
        self._shapes.update(shapes)
        for source, own in enumerate(actions):
            if source != self._line.place:
                for target, message in sent_by(own, self._placement):
                    if target == self._line.place:
                        self._expected[source].append(message)

    def shape_of(self, microbatch: int) -> ShapeKey:
        return self._shapes[microbatch]

    def forget(self, microbatch: int) -> None:
        """Nothing more will come of this one."""
        self._shapes.pop(microbatch, None)

    def send(self, message: Message, tensor: Tensor) -> None:
        target = self._placement[message.stage]
        if target == self._line.place:
            self._at_hand[message] = tensor
            return
        group = self._line.group(source=self._line.place, target=target)
        tensor = tensor.contiguous()
        if message.way == "forward" and self._book.is_new(message.stage, self._shapes[message.microbatch]):
            header = _header(tensor)
            self._leaving.append((dist.isend(header, self._line.ranks[target], group=group), header))
        self._leaving.append((dist.isend(tensor, self._line.ranks[target], group=group), tensor))
        while self._leaving and has_left(self._leaving[0][0]):
            self._leaving.popleft()

    def receive(self, message: Message, *, device: torch.device) -> Tensor:
        if message in self._at_hand:
            return self._at_hand.pop(message)
        source = self._sender(message)
        while message not in self._arriving:
            self._expect(self._expected[source].popleft(), source, device=device)
        work, tensor = self._arriving.pop(message)
        work.wait()
        return tensor

    def finish(self) -> None:
        """Everything has left, and everything that was expected has come."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()
        if self._arriving or self._at_hand or any(self._expected.values()):
            raise RuntimeError("the pipeline ended with messages that nobody took")

    def _sender(self, message: Message) -> int:
        return self._placement[message.stage + (-1 if message.way == "forward" else 1)]

    def _expect(self, message: Message, source: int, *, device: torch.device) -> None:
        shape_key = self._shapes[message.microbatch]
        group = self._line.group(source=source, target=self._line.place)
        rank = self._line.ranks[source]
        if message.way == "backward":
            shape, dtype = self._book.given[message.stage, shape_key]
        elif self._book.is_new(message.stage, shape_key):
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=device)
            dist.recv(header, rank, group=group)
            shape, dtype = self._book.taken[message.stage, shape_key] = _read(header)
        else:
            shape, dtype = self._book.taken[message.stage, shape_key]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self._arriving[message] = (dist.irecv(tensor, rank, group=group), tensor)


def has_left(work: Any) -> bool:
    """Whether a message's memory is free again. In a dry run, where no message ever leaves, it has at once."""
    return bool(work.is_completed())


class Book:
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
