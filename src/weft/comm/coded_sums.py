"""Collectives whose numbers travel as codes: rounded once in a reduce-scatter, twice in an all-reduce.

    reduce-scatter   every rank sends each other one its share as codes (all-to-all), sums what it receives
    all-reduce       as above, then every rank sends the codes of its sum to all
    all-gather       every rank sends the codes of its own numbers to all, and takes what they say itself
    by node          an all-to-all inside each node, then the codes of its sums in one between nodes: rounded once more,
                     and each card sends as many bytes as there are ranks on a node less (qgZ of ZeRO++)

A ring would round at every hop: its error grows with the number of ranks, this one's does not. A rank's own share is
rounded as all others, and every rank decodes the same codes, so the result is the same on all of them. Sums are made in
float64 and rounded to float32 once: the order of ranks does not matter. Blocks of codes are those of a parameter
(`codes.py`), and shares of an all-reduce are whole blocks (`code_shares.py`): what arrives of a parameter does not
depend on what else is sent.

With error feedback a rank adds what its codes lost to the numbers it sends next in the same place; the owner of a share
adds what the codes of the sum lost, so both roundings of an all-reduce are made up for. What has arrived after any
number of sums is what was given, but for the errors held now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.code_shares import divide, joined, shares_of, spans_of
from weft.comm.codes import Sizes, decode, encode
from weft.comm.observer import wire_format
from weft.comm.sums import GroupSum

REDUCE, GATHER = "reduce", "gather"  # components of the table of formats
# torch 2.13 renames it and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class CodedRecord:
    """One collective on this rank, for those that check it: what it gave, and what it got."""

    group: dist.ProcessGroup
    format: str
    kind: Literal["reduce_scatter", "all_reduce", "all_gather"]
    sizes: Sizes  # of the parameters; of a reduce-scatter those of each row
    given: Tensor  # earlier errors added; of a reduce-scatter [ranks, count], else [count]
    received: Tensor
    place: str = ""  # of its errors, with error feedback
    without_errors: Tensor | None = None  # `given` before earlier errors were added
    own: slice | None = None  # of an all-reduce, the numbers whose sum this rank rounds
    near: int = 1  # neighbours of a node that sum first
    partial: tuple[slice, ...] = ()  # the numbers whose sum over a node this rank rounds


@dataclass(frozen=True)
class Nodes:
    """The groups of a sum by node: the neighbours of this rank, and the ranks in its place on all nodes."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup


_watchers: list[Callable[[CodedRecord], None]] = []


@contextmanager
def watching_sums(watcher: Callable[[CodedRecord], None]) -> Iterator[None]:
    """Call `watcher` with every sum in codes of this process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@torch.no_grad()
def gather_codes(rows: Tensor, own: Tensor, group: dist.ProcessGroup, name: str, sizes: Sizes = ()) -> None:
    """Every rank's `own` [count] into `rows` [ranks, count], as its codes say. `own` may be this rank's row; `sizes`:
    of its parameters."""
    given, sizes = own.clone() if _watchers else own, sizes or (own.numel(),)
    wire = _wire(name)
    messages = _gather(encode(own.reshape(1, -1), wire, sizes)[0], group, GATHER, wire)
    for row, message in zip(rows, torch.split(messages, 1), strict=True):
        row.copy_(decode(message, sizes, wire)[0])
    _tell(CodedRecord(group, name, "all_gather", sizes, given, rows))


def _gather(message: Tensor, group: dist.ProcessGroup, component: str, name: str) -> Tensor:
    """[ranks, length]: the messages of all ranks."""
    messages = message.new_empty((group.size(), message.numel()))
    with wire_format(component, name):
        _all_gather(messages.view(-1), message, group=group)
    return messages


@contextmanager
def without_rounding() -> Iterator[None]:
    """The same collectives with float32 numbers: what differs from the codes is their rounding alone."""
    _Scatter.rounds = False
    try:
        yield
    finally:
        _Scatter.rounds = True


def _wire(name: str) -> str:
    return name if _Scatter.rounds else "float32"


@torch.no_grad()
def scatter_sum(
    shares: Tensor,
    group: dist.ProcessGroup,
    name: str,
    errors: Tensor | None = None,
    *,
    sizes: Sizes = (),
    place: str = "",
    nodes: Nodes | None = None,
) -> Tensor:
    """This rank's row of the sum of `shares` [ranks, count] over the group, in float32. `sizes`: of the parameters of
    each row. `errors`, of the shape of the shares, are those of the sum before in this place; they become those of this
    one."""
    sizes, wire = sizes or (shares.shape[1],), _wire(name)
    record = CodedRecord(group, name, "reduce_scatter", sizes, shares, shares, place)
    given, record = _with_errors(shares, errors, record)
    messages = encode(given, wire, sizes)
    scatter = _Scatter.begin(messages, (sizes,) * len(shares), group, wire, nodes)
    if errors is not None:
        keep_errors(errors, messages, sizes, wire)
    summed = scatter.finish(errors)
    _tell(replace(record, received=summed, near=scatter.near, partial=scatter.partial))
    return summed


def _with_errors(shares: Tensor, errors: Tensor | None, record: CodedRecord) -> tuple[Tensor, CodedRecord]:
    """Shares with the errors before, in the memory of the errors, and the record of both."""
    if errors is None:
        return shares, record
    errors.add_(shares)
    if not _watchers:
        return errors, record
    return errors, replace(record, given=errors.clone(), without_errors=shares.clone())


def keep_errors(given: Tensor, sent: Tensor, sizes: Sizes, name: str) -> None:
    """Turn the numbers of some messages into what their codes lost."""
    for row, message in zip(torch.split(given, 1), torch.split(sent, 1), strict=True):
        row -= decode(message, sizes, name)


class CodedSum(GroupSum):
    """All-reduces whose numbers travel as codes; `begin` overlaps the first half of each with what follows.

    The second half of a sum begins with the next sum, or in `finish`: in one order on all ranks, and never in a thread
    of the backend's.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str, nodes: Nodes | None = None) -> None:
        super().__init__(group)
        self._name, self._nodes = name, nodes
        self._under_way: _UnderWay | None = None
        self.errors: list[Tensor] = []  # by place, with error feedback

    def feed_back(self, counts: Sequence[int], *, device: torch.device) -> None:
        """Keep the errors of the sums of these numbers of elements, by place."""
        self.errors = [torch.zeros(count, device=device) for count in counts]

    def sum(self, values: Tensor, *, place: int = 0, sizes: Sizes = ()) -> None:
        self.begin(values, place=place, sizes=sizes)
        self.finish()

    @torch.no_grad()
    def begin(self, values: Tensor, *, place: int = 0, sizes: Sizes = ()) -> torch.futures.Future[Tensor]:
        self.finish()
        devices: list[int | str | torch.device] | None = [values.device] if values.is_cuda else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        sizes, wire, ranks = sizes or (values.numel(),), _wire(self._name), self.group.size()
        flat, errors = values.reshape(-1).float(), self.errors[place] if self.errors else None
        if _watchers:
            flat = flat.clone()  # of the values as they were given
        shares = shares_of(sizes, ranks)
        own = spans_of(shares)[self.group.rank()]
        record = CodedRecord(self.group, self._name, "all_reduce", sizes, flat, values, str(place), own=own)
        given, record = _with_errors(flat, errors, record)
        message = encode(given.unsqueeze(0), wire, sizes)[0]
        scatter = _Scatter.begin(divide(message, shares, wire), shares, self.group, wire, self._nodes)
        if errors is not None:
            keep_errors(errors.unsqueeze(0), message.unsqueeze(0), sizes, wire)
        self._under_way = _UnderWay(values, record, scatter, errors, done)
        return done

    @torch.no_grad()
    def finish(self) -> None:
        one, self._under_way = self._under_way, None
        if one is None:
            return
        scatter, sizes = one.scatter, one.record.sizes
        summed = scatter.finish(one.errors)
        shares, rank = shares_of(sizes, self.group.size()), self.group.rank()
        message = _filled(encode(summed.unsqueeze(0), scatter.name, shares[rank])[0], scatter.sent.shape[-1])
        rows = self._gathered(message, scatter.name)
        arrived = decode(joined(rows, shares, scatter.name).unsqueeze(0), sizes, scatter.name)[0]
        one.values.view(-1).copy_(arrived)
        if one.errors is not None:
            one.errors[one.record.own] += summed - arrived[one.record.own]
        _tell(replace(one.record, near=scatter.near, partial=scatter.partial))
        one.done.set_result(one.values)

    def _gathered(self, message: Tensor, name: str) -> Tensor:
        """[ranks, length]: the messages of all ranks; between nodes each travels once to each node."""
        if self._nodes is None:
            return _gather(message, self.group, REDUCE, name)
        of_nodes = _gather(message, self._nodes.between, REDUCE, name)
        by_neighbour = _gather(of_nodes.view(-1), self._nodes.inside, REDUCE, name)
        return by_neighbour.view(-1, *of_nodes.shape).transpose(0, 1).reshape(self.group.size(), -1)


@dataclass(frozen=True)
class _Scatter:
    """Messages on their way to the owners of their shares, or by node to the neighbour who sums them first."""

    sent: Tensor  # [ranks, length], by node [neighbours, nodes, length]; must outlive the collective
    received: Tensor
    work: Any
    shares: tuple[Sizes, ...]  # that this rank sums first: its own, by node also those of its place on other nodes
    spans: tuple[slice, ...]  # of these shares
    name: str
    nodes: Nodes | None
    rounds: ClassVar[bool] = True

    @property
    def near(self) -> int:
        return self.nodes.inside.size() if self.nodes else 1

    @property
    def partial(self) -> tuple[slice, ...]:
        return self.spans if self.nodes else ()

    @staticmethod
    @torch.no_grad()
    def begin(
        messages: Tensor, shares: tuple[Sizes, ...], group: dist.ProcessGroup, name: str, nodes: Nodes | None = None
    ) -> _Scatter:
        near, place = (nodes.inside.size(), nodes.inside.rank()) if nodes else (group.size(), group.rank())
        if nodes:
            messages = messages.view(-1, near, messages.shape[1]).transpose(0, 1).contiguous()
        received = torch.empty_like(messages)
        with wire_format(REDUCE, name):
            work = dist.all_to_all_single(received, messages, group=nodes.inside if nodes else group, async_op=True)
        spans = tuple(spans_of(shares)[place::near])
        return _Scatter(messages, received, work, shares[place::near], spans, name, nodes)

    @torch.no_grad()
    def finish(self, errors: Tensor | None = None) -> Tensor:
        """The sum of what the ranks sent. `errors` get what the codes of a node's sums lost."""
        if self.work is not None:
            self.work.wait()
        if self.nodes is None:
            return self._sum(self.received, self.shares[0])
        received = torch.empty_like(self.received[0])
        messages = torch.stack([self._again(at, errors) for at in range(len(self.shares))])
        with wire_format(REDUCE, self.name):
            dist.all_to_all_single(received, messages, group=self.nodes.between)
        return self._sum(received, self.shares[self.nodes.between.rank()])

    def _again(self, at: int, errors: Tensor | None) -> Tensor:
        """The message of the sum over this node of one share."""
        sizes = self.shares[at]
        summed = self._sum(self.received[:, at], sizes)
        message = encode(summed.unsqueeze(0), self.name, sizes)
        if errors is not None:
            errors.view(-1)[self.spans[at]] += summed - decode(message, sizes, self.name)[0]
        return _filled(message[0], self.received.shape[-1])

    def _sum(self, messages: Tensor, sizes: Sizes) -> Tensor:
        """Their sum, rounded once."""
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=messages.device)
        for message in torch.split(messages, 1):  # rank by rank: decoded numbers of all would take much memory
            total += decode(message, sizes, self.name)[0]
        return total.float()


def _filled(message: Tensor, length: int) -> Tensor:
    """A message as long as those of other shares."""
    return F.pad(message, (0, length - message.numel()))


@dataclass(frozen=True)
class _UnderWay:
    """An all-reduce in its first half."""

    values: Tensor
    record: CodedRecord
    scatter: _Scatter
    errors: Tensor | None
    done: torch.futures.Future[Tensor]


def _tell(record: CodedRecord) -> None:
    for watcher in _watchers:
        watcher(record)
