"""Activations and gradients between stages: sent at once, received in the order in which the sender sends.

Two ranks may exchange messages of several stages in both directions, and NCCL has no message tags. So the schedule
defines the order: a rank's actions determine its messages; the receiver posts receives in just that order, and keeps
messages that it does not need yet. Each direction has a separate group, since two ranks that both begin with a send
would deadlock on one.

A header with the shape of a stage's output precedes its first message, once per shape of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.messages import waiting_for
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
    ahead: int = 0  # receives posted before they are needed

    def group(self, *, source: int, target: int) -> dist.ProcessGroup:
        return self.down if source < target else self.up


def sent_by(actions: Iterable[Action], stage_to_rank: Sequence[int]) -> Iterator[tuple[int, Message]]:
    """(target place, message) for every message of a rank's actions, in order; none to itself."""
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
    """A message in flight: its memory must not change."""

    message: Message
    work: Any
    tensor: Tensor


class P2PExchange:
    """The messages of a schedule's actions: each is sent and received once.

    Gloo reports a completed send only in `wait`. But a message from a rank's later action proves that the rank has
    received the messages of its earlier actions: then `wait` returns at once, and the memory is freed.
    """

    def __init__(self, links: StageLinks, stage_to_rank: Sequence[int], known_shapes: ShapeRegistry) -> None:
        self._links, self._placement, self._known_shapes = links, stage_to_rank, known_shapes
        self._shapes: dict[int, ShapeKey] = {}
        self._num_known = [0] * len(links.ranks)  # actions of every rank
        self._expected: dict[int, deque[tuple[Message, int]]] = defaultdict(deque)  # with the sender's action
        self._taken_at: dict[Message, int] = {}  # the receiver's action, of messages that this rank sends
        self._arriving: dict[Message, tuple[Any, Tensor, int]] = {}
        self._at_hand: dict[Message, Tensor] = {}
        self._leaving: dict[int, list[_Sent]] = defaultdict(list)  # by place

    def expect(self, actions: Sequence[Sequence[Action]], shapes: Mapping[int, ShapeKey]) -> None:
        """Register the next actions of all ranks; `shapes` by micro-batch, of those with forwards among them."""
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
        """No more messages of this micro-batch will come."""
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
        for _ in range(self._links.ahead):  # a receive posted late waits for the full transfer
            if self._can_post(source):
                self._post(source, device=device)
        work, tensor, made_at = self._arriving.pop(message)
        with waiting_for(_described(message), self._links.ranks[source]):
            work.wait()
        self._free_received(source, before=made_at)
        return tensor

    def finish(self) -> None:
        """Wait for all sends; fails if an expected message was not received."""
        for place, leaving in self._leaving.items():
            for sent in leaving:
                with waiting_for(_described(sent.message), self._links.ranks[place]):
                    sent.work.wait()
        self._leaving.clear()
        if self._arriving or self._at_hand or any(self._expected.values()):
            raise RuntimeError("the pipeline ended with messages that no action received")

    def _free_received(self, place: int, *, before: int) -> None:
        """Free messages that the rank at `place` has received before its action `before`."""
        is_taken = {one.message: self._taken_at.get(one.message, before + 1) <= before for one in self._leaving[place]}
        for sent in (one for one in self._leaving[place] if is_taken[one.message]):
            with waiting_for(_described(sent.message), self._links.ranks[place]):
                sent.work.wait()
            self._taken_at.pop(sent.message, None)
        self._leaving[place] = [one for one in self._leaving[place] if not is_taken[one.message]]

    def _sender(self, message: Message) -> int:
        return self._placement[message.stage + (-1 if message.way == "forward" else 1)]

    def _can_post(self, source: int) -> bool:
        """Whether the next message from there and its shape are known, so that posting its receive does not block."""
        if not self._expected[source]:
            return False
        message, _ = self._expected[source][0]
        if message in self._arriving or len(self._arriving) > self._links.ahead:
            return False
        known = self._known_shapes.given if message.way == "backward" else self._known_shapes.taken
        return (message.stage, self._shapes.get(message.microbatch)) in known

    def _post(self, source: int, *, device: torch.device) -> None:
        """Post the receive of the next message from `source`."""
        message, made_at = self._expected[source].popleft()
        shape_key = self._shapes[message.microbatch]
        group = self._links.group(source=source, target=self._links.place)
        rank = self._links.ranks[source]
        if message.way == "backward":
            shape, dtype = self._known_shapes.given[message.stage, shape_key]
        elif self._known_shapes.is_new(message.stage, shape_key):
            header = torch.empty(HEADER_NUMBERS, dtype=torch.int64, device=device)
            with waiting_for(_described(message), rank):
                dist.recv(header, rank, group=group)
            shape, dtype = self._known_shapes.taken[message.stage, shape_key] = _read(header)
        else:
            shape, dtype = self._known_shapes.taken[message.stage, shape_key]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        self._arriving[message] = (dist.irecv(tensor, rank, group=group), tensor, made_at)


def _described(message: Message) -> str:
    what = "activations" if message.way == "forward" else "gradients"
    return f"{what} of micro-batch {message.microbatch} for stage {message.stage}"


def has_left(work: Any) -> bool:
    """Whether a message's memory is free again. A dry run sends nothing and returns True."""
    return bool(work.is_completed())


class ShapeRegistry:
    """Known shapes, for the life of an engine: (stage, shape of the micro-batch) -> (shape, dtype)."""

    def __init__(self) -> None:
        self.given: dict[tuple[int, ShapeKey], tuple[tuple[int, ...], torch.dtype]] = {}
        self.taken: dict[tuple[int, ShapeKey], tuple[tuple[int, ...], torch.dtype]] = {}
        self._announced: set[tuple[int, ShapeKey]] = set()

    def expect(self, stage: int, shape_key: ShapeKey, *, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Register the input of `stage` in advance: then no header is sent or received."""
        self.taken[stage, shape_key] = (shape, dtype)
        self._announced.add((stage, shape_key))

    def is_new(self, stage: int, shape_key: ShapeKey) -> bool:
        """Whether the input of `stage` has had no header yet; it counts as announced from now on."""
        is_new = (stage, shape_key) not in self._announced
        self._announced.add((stage, shape_key))
        return is_new


def _header(tensor: Tensor) -> Tensor:
    numbers = [DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
    return torch.tensor(numbers + [0] * (HEADER_NUMBERS - len(numbers)), dtype=torch.int64, device=tensor.device)


def _read(header: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    dtype, ndim, *sizes = header.tolist()
    return tuple(sizes[:ndim]), DTYPES[dtype]
