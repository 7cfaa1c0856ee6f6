"""Collectives whose numbers travel as codes: rounded once in a reduce-scatter, twice in an all-reduce.

    reduce-scatter   every rank sends each other one its share as codes (all-to-all), sums what it receives
    all-reduce       as above, then every rank sends the codes of its sum to all
    all-gather       every rank sends the codes of its own numbers to all, and takes what they say itself

A ring would round at every hop: its error grows with the number of ranks, this one's does not. A rank's own share is
rounded as all others, and every rank decodes the same codes, so the result is the same on all of them. Sums are made in
float64 and rounded to float32 once: the order of ranks does not matter.

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

from weft.comm.codes import decode, encode
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
    given: Tensor  # [ranks, count], earlier errors added; of an all-gather [count]
    received: Tensor
    place: str = ""  # of its errors, with error feedback
    without_errors: Tensor | None = None  # `given` before earlier errors were added


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
def gather_codes(rows: Tensor, own: Tensor, group: dist.ProcessGroup, name: str) -> None:
    """Every rank's `own` [count] into `rows` [ranks, count], as its codes say. `own` may be this rank's row."""
    given = own.clone() if _watchers else own
    _gather(rows, own, group, GATHER, name)
    _tell(CodedRecord(group, name, "all_gather", given, rows))


def _gather(rows: Tensor, own: Tensor, group: dist.ProcessGroup, component: str, name: str) -> Tensor:
    """Returns what the codes of `own` say. Rows may be fewer numbers than codes: the last ones are padding."""
    name, count = name if _Scatter.rounds else "float32", own.numel()
    message = encode(own.reshape(1, -1), name)
    messages = message.new_empty((group.size(), message.shape[1]))
    with wire_format(component, name):
        _all_gather(messages.view(-1), message.view(-1), group=group)
    flat = rows.view(-1)
    for part, one in zip(torch.split(flat, count), torch.split(messages, 1), strict=False):
        part.copy_(decode(one, count, name)[0, : part.numel()])
    return decode(message, count, name)[0]


@contextmanager
def without_rounding() -> Iterator[None]:
    """The same collectives with float32 numbers: what differs from the codes is their rounding alone."""
    _Scatter.rounds = False
    try:
        yield
    finally:
        _Scatter.rounds = True


@torch.no_grad()
def scatter_sum(
    shares: Tensor, group: dist.ProcessGroup, name: str, errors: Tensor | None = None, *, place: str = ""
) -> Tensor:
    """This rank's row of the sum of `shares` [ranks, count] over the group, in float32. `errors`, of the shape of the
    shares, are those of the sum before in this place; they become those of this one."""
    given, record = _with_errors(shares, errors, CodedRecord(group, name, "reduce_scatter", shares, shares, place))
    scatter = _Scatter.begin(given, group, name)
    summed = scatter.finish()
    if errors is not None:
        scatter.keep_errors(errors)
    _tell(replace(record, received=summed))
    return summed


def _with_errors(shares: Tensor, errors: Tensor | None, record: CodedRecord) -> tuple[Tensor, CodedRecord]:
    """Shares with the errors before, in the memory of the errors, and the record of both."""
    if errors is None:
        return shares, record
    errors.add_(shares)
    if not _watchers:
        return errors, record
    return errors, replace(record, given=errors.clone(), without_errors=shares.clone())


class CodedSum(GroupSum):
    """All-reduces whose numbers travel as codes; `begin` overlaps the first half of each with what follows.

    The second half of a sum begins with the next sum, or in `finish`: in one order on all ranks, and never in a thread
    of the backend's.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str) -> None:
        super().__init__(group)
        self._name = name
        self._under_way: _UnderWay | None = None
        self.errors: list[Tensor] = []  # by place, with error feedback

    def feed_back(self, sizes: Sequence[int], *, device: torch.device) -> None:
        """Keep the errors of the sums of these numbers of elements, by place."""
        ranks = self.group.size()
        self.errors = [torch.zeros(ranks, -(-size // ranks), device=device) for size in sizes]

    def sum(self, values: Tensor, *, place: int = 0) -> None:
        self.begin(values, place=place)
        self.finish()

    @torch.no_grad()
    def begin(self, values: Tensor, *, place: int = 0) -> torch.futures.Future[Tensor]:
        self.finish()
        devices: list[int | str | torch.device] | None = [values.device] if values.is_cuda else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        shares, errors = _in_shares(values, self.group.size()), self.errors[place] if self.errors else None
        if _watchers:
            shares = shares.clone()  # of the values as they were given
        record = CodedRecord(self.group, self._name, "all_reduce", shares, values, str(place))
        given, record = _with_errors(shares, errors, record)
        scatter = _Scatter.begin(given, self.group, self._name)
        self._under_way = _UnderWay(values, record, scatter, errors, done)
        return done

    @torch.no_grad()
    def finish(self) -> None:
        one, self._under_way = self._under_way, None
        if one is None:
            return
        summed = one.scatter.finish()
        arrived = _gather(one.values, summed, self.group, REDUCE, self._name)
        if one.errors is not None:
            one.scatter.keep_errors(one.errors)
            one.errors[self.group.rank()] += summed - arrived
        _tell(one.record)
        one.done.set_result(one.values)


@dataclass(frozen=True)
class _Scatter:
    """Shares on their way to their owners."""

    sent: Tensor  # must outlive the collective
    received: Tensor
    work: Any
    count: int  # elements of a share
    name: str
    rounds: ClassVar[bool] = True

    @staticmethod
    @torch.no_grad()
    def begin(shares: Tensor, group: dist.ProcessGroup, name: str) -> _Scatter:
        name = name if _Scatter.rounds else "float32"
        sent = encode(shares, name)
        received = torch.empty_like(sent)
        with wire_format(REDUCE, name):
            work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return _Scatter(sent, received, work, shares.shape[1], name)

    @torch.no_grad()
    def finish(self) -> Tensor:
        """The sum of what the ranks sent, rounded once."""
        if self.work is not None:
            self.work.wait()
        total = torch.zeros(self.count, dtype=torch.float64, device=self.received.device)
        for message in torch.split(self.received, 1):  # rank by rank: decoded numbers of all would take much memory
            total += decode(message, self.count, self.name)[0]
        return total.float()

    @torch.no_grad()
    def keep_errors(self, given: Tensor) -> None:
        """Turn the numbers that were sent into what their codes lost."""
        for row, message in zip(torch.split(given, 1), torch.split(self.sent, 1), strict=True):
            row -= decode(message, self.count, self.name)


@dataclass(frozen=True)
class _UnderWay:
    """An all-reduce in its first half."""

    values: Tensor
    record: CodedRecord
    scatter: _Scatter
    errors: Tensor | None
    done: torch.futures.Future[Tensor]


def _in_shares(values: Tensor, num_ranks: int) -> Tensor:
    """[ranks, count], filled up with zeros."""
    flat = values.reshape(-1).float()
    missing = -flat.numel() % num_ranks
    return (F.pad(flat, (0, missing)) if missing else flat).view(num_ranks, -1)


def _tell(record: CodedRecord) -> None:
    for watcher in _watchers:
        watcher(record)
