"""Runs an algorithm's rounds on a process group: tensors as messages, on the point-to-point calls of any backend.

Messages are divided into segments. Those of Gloo are posted ahead, and each is added while later ones arrive and sent
on at once, across rounds. A pair of Gloo's carries one message at a time, in either direction: messages to higher and
to lower ranks have groups of their own. NCCL has no tags: a round is one batch.

A segment may be
    sent      once all received segments of earlier rounds that overlap it are in place
    received  in place of elements once all sends of them in earlier rounds have left
Posting sends of a round before waiting for its receives, and waiting only for sends of rounds before, cannot deadlock.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.algorithms.registry import Algorithm
from weft.comm.algorithms.rounds import CollectiveTask, ElementRange, Message, Receive, Send

SEGMENT_BYTES = 2**22
AHEAD = 3  # receives posted before their turn


class Wire:
    """The messages among the ranks of two groups: `up` for those to higher ranks, `down` for those to lower ones.

    Nothing else may use the groups. `sent_bytes` and `sent_messages` count what was handed to the backend.
    """

    def __init__(
        self, up: dist.ProcessGroup, down: dist.ProcessGroup, *, device_type: str, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.rank, self.size = up.rank(), up.size()
        self._segment_bytes = segment_bytes
        self._group = up
        # Messages go to the backend itself: they are parts of a collective, which is the one to be observed.
        self._backends: list[Any] = [one._get_backend(torch.device(device_type)) for one in (up, down)]
        self._has_tags = isinstance(self._backends[0], dist.ProcessGroupGloo)
        self.sent_bytes = self.sent_messages = 0

    def run(self, algorithm: Algorithm, task: CollectiveTask, source: Tensor, target: Tensor) -> None:
        """Run a collective; flat contiguous buffers of the task's addresses, one and the same if it is in place."""
        if refusal := algorithm.refusal(task.num_ranks, task.per_node):
            raise ValueError(refusal)
        is_one = source.data_ptr() == target.data_ptr()
        if task.num_ranks != self.size or (is_one != algorithm.in_place and task.count):
            raise ValueError(f"{algorithm.name}: other ranks or buffers than the task's")
        if self._has_tags:
            _Streamed(self, algorithm, task, source, target).run()
        else:
            self._run_batches(algorithm, task, source, target)

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm, *, per_node: int = 1) -> None:
        """Sum a contiguous tensor over the group, in place."""
        flat = tensor.view(-1)
        task = CollectiveTask(num_ranks=self.size, count=flat.numel(), per_node=per_node)
        if algorithm.in_place:
            self.run(algorithm, task, flat, flat)
        else:
            self.run(algorithm, task, flat.clone(), flat)

    def segments(self, span: ElementRange, itemsize: int) -> Iterator[ElementRange]:
        """`span` in pieces that both ends of a message agree on; none if it is empty."""
        length = max(1, self._segment_bytes // itemsize)
        for start in range(span.start, span.stop, length):
            yield ElementRange(start, min(start + length, span.stop))

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        self.count(tensor)
        return self._way(self.rank, peer).send([tensor], peer, tag)

    def post_receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return self._way(peer, self.rank).recv([tensor], peer, tag)

    def count(self, tensor: Tensor) -> None:
        self.sent_bytes += tensor.nbytes
        self.sent_messages += 1

    def _way(self, source: int, target: int) -> Any:
        return self._backends[0 if target > source else 1]

    def _run_batches(self, algorithm: Algorithm, task: CollectiveTask, source: Tensor, target: Tensor) -> None:
        for messages in algorithm.rounds(task, self.rank):
            calls, arrived = [], []
            own = deque(one.span for one in messages if isinstance(one, Send) and one.peer == self.rank)
            for one in messages:
                if one.peer == self.rank or not one.span.size:
                    if isinstance(one, Receive) and one.span.size:
                        arrived.append((one, source[slice(*own.popleft())]))
                elif isinstance(one, Send):
                    sent = source[slice(*one.span)]
                    self.count(sent)
                    calls.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=one.peer))
                else:
                    place = target[slice(*one.span)]
                    into = torch.empty_like(place) if one.adds else place
                    calls.append(dist.P2POp(dist.irecv, into, group=self._group, group_peer=one.peer))
                    if one.adds:
                        arrived.append((one, into))
            for work in dist.batch_isend_irecv(calls) if calls else ():
                work.wait()
            for receive, values in arrived:
                _place(target, receive.span, values, adds=receive.adds)


@dataclass
class _Segment:
    """A piece of a message; `position` is its place among the rank's receives, for a send that of the last it needs."""

    round: int
    message: Message
    span: ElementRange
    tag: int
    position: int = -1
    work: Any = None
    is_posted: bool = False
    staged: Tensor | None = None
    own: ElementRange | None = None  # of a receive from this rank itself: the elements of the source

    @property
    def adds(self) -> bool:
        return isinstance(self.message, Receive) and self.message.adds

    def finish(self) -> None:
        """Wait for the backend, once: Gloo waits for another message the second time."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()


class _Streamed:
    """One collective on one rank: receives in the order of the rounds, everything else as early as it may."""

    def __init__(self, wire: Wire, algorithm: Algorithm, task: CollectiveTask, source: Tensor, target: Tensor) -> None:
        self._wire, self._source, self._target = wire, source, target
        self._sends: deque[_Segment] = deque()
        self._receives: list[_Segment] = []
        self._left: deque[_Segment] = deque()  # posted sends, oldest first
        self._in_place = algorithm.in_place
        self._free: list[Tensor] = []  # staging
        self._list(algorithm, task)

    def run(self) -> None:
        posted = 0
        for index, segment in enumerate(self._receives):
            self._post_sends(before=index)
            self._release_sends(before=segment.round - 1)
            self._post_receive(segment)
            posted = max(posted, index + 1)
            while posted < min(len(self._receives), index + 1 + AHEAD) and self._may_post(posted):
                self._post_receive(self._receives[posted])
                posted += 1
            self._finish(segment)
        self._post_sends(before=len(self._receives))
        for sent in self._left:
            sent.finish()

    def _list(self, algorithm: Algorithm, task: CollectiveTask) -> None:
        """All segments of the rank, in order, with tags that count per peer and direction."""
        tags: Counter[tuple[type, int]] = Counter()
        for number, messages in enumerate(algorithm.rounds(task, self._wire.rank)):
            own = deque(one.span for one in messages if isinstance(one, Send) and one.peer == self._wire.rank)
            before = len(self._receives)
            for one in messages:
                if one.peer == self._wire.rank:
                    if isinstance(one, Receive):
                        self._receives.append(_Segment(number, one, one.span, 0, own=own.popleft()))
                    continue
                for span in self._wire.segments(one.span, self._target.itemsize):
                    segment = _Segment(number, one, span, tags[type(one), one.peer])
                    tags[type(one), one.peer] += 1
                    if isinstance(one, Receive):
                        self._receives.append(segment)
                    else:
                        segment.position = self._last_received(span, before) if algorithm.in_place else -1
                        self._sends.append(segment)

    def _last_received(self, span: ElementRange, before: int) -> int:
        for index in range(before - 1, -1, -1):
            if self._receives[index].span.overlaps(span):
                return index
        return -1

    def _post_sends(self, *, before: int) -> None:
        """Post sends in order while their elements are in place: those of this round and of earlier ones all are."""
        while self._sends and self._sends[0].position < before:
            segment = self._sends.popleft()
            values = self._source[slice(*segment.span)]
            segment.work = self._wire.post_send(values, segment.message.peer, segment.tag)
            self._left.append(segment)

    def _release_sends(self, *, before: int) -> None:
        while self._left and self._left[0].round < before:
            self._left.popleft().finish()

    def _may_post(self, index: int) -> bool:
        """Whether a receive can be posted before its turn: no earlier round still sends the elements it replaces."""
        segment = self._receives[index]
        if segment.own is not None or segment.adds or not self._in_place:
            return True
        return not any(one.span.overlaps(segment.span) for one in self._sends_before(segment.round))

    def _sends_before(self, number: int) -> Iterator[_Segment]:
        for one in itertools.chain(self._left, self._sends):
            if one.round >= number:
                return
            yield one

    def _post_receive(self, segment: _Segment) -> None:
        if segment.is_posted or segment.own is not None:
            return
        segment.is_posted = True
        into = self._target[slice(*segment.span)]
        if segment.adds:
            into = segment.staged = self._staging(into)
        else:
            self._wait_for_sends(segment.span, before=segment.round)
        segment.work = self._wire.post_receive(into, segment.message.peer, segment.tag)

    def _staging(self, place: Tensor) -> Tensor:
        for index, free in enumerate(self._free):
            if free.numel() >= place.numel():
                return self._free.pop(index)[: place.numel()]
        return torch.empty_like(place)

    def _finish(self, segment: _Segment) -> None:
        if segment.own is not None:
            _place(self._target, segment.span, self._source[slice(*segment.own)], adds=segment.adds)
            return
        segment.finish()
        if segment.staged is not None:
            self._wait_for_sends(segment.span, before=segment.round + 1)
            _place(self._target, segment.span, segment.staged, adds=True)
            self._free.append(segment.staged)
            segment.staged = None

    def _wait_for_sends(self, span: ElementRange, *, before: int) -> None:
        """Wait until elements that change now have left; all sends of these rounds are posted."""
        for one in self._sends_before(before) if self._in_place else ():
            if one.span.overlaps(span):
                one.finish()


def _place(target: Tensor, span: ElementRange, values: Tensor, *, adds: bool) -> None:
    place = target[slice(*span)]
    if adds:
        place.add_(values)
    else:
        place.copy_(values)
