"""Sums over a group whose numbers travel as codes: rounded once for a reduce-scatter, twice for an all-reduce.

    reduce-scatter   every rank sends each other one its share as codes (all-to-all), sums what it receives
    all-reduce       as above, then every rank sends the codes of its sum to all (all-gather)

A ring would round at every hop: its error grows with the number of ranks, this one's does not. A rank's own share is
rounded as all others, and every rank decodes the same codes, so the result is the same on all of them. Sums are made in
float64 and rounded to float32 once: the order of ranks does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.codes import decode, encode
from weft.comm.observer import wire_format
from weft.comm.sums import GroupSum

REDUCE = "reduce"  # the component of the table of formats
# torch 2.13 renames it and warns about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class CodedSumRecord:
    """One sum on this rank, for those that check it: what it gave, and what it got."""

    group: dist.ProcessGroup
    format: str
    is_scattered: bool  # a reduce-scatter: `received` is this rank's share
    given: Tensor  # [ranks, count]
    received: Tensor


_watchers: list[Callable[[CodedSumRecord], None]] = []


@contextmanager
def watching_sums(watcher: Callable[[CodedSumRecord], None]) -> Iterator[None]:
    """Call `watcher` with every sum in codes of this process."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def without_rounding() -> Iterator[None]:
    """The same collectives with float32 numbers: what differs from the codes is their rounding alone."""
    _Scatter.rounds = False
    try:
        yield
    finally:
        _Scatter.rounds = True


def scatter_sum(shares: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    """This rank's row of the sum of `shares` [ranks, count] over the group, in float32."""
    summed = _Scatter.begin(shares, group, name).finish()
    _tell(group, name, shares, summed, is_scattered=True)
    return summed


class CodedSum(GroupSum):
    """All-reduces whose numbers travel as codes; `begin` overlaps the first half of each with what follows.

    The second half of a sum begins with the next sum, or in `finish`: in one order on all ranks, and never in a thread
    of the backend's.
    """

    def __init__(self, group: dist.ProcessGroup, *, name: str) -> None:
        super().__init__(group)
        self._name = name
        self._under_way: _UnderWay | None = None

    def sum(self, values: Tensor) -> None:
        self.begin(values)
        self.finish()

    def begin(self, values: Tensor) -> torch.futures.Future[Tensor]:
        self.finish()
        devices: list[int | str | torch.device] | None = [values.device] if values.is_cuda else None
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        shares = _in_shares(values, self.group.size())
        if _watchers:
            shares = shares.clone()  # of the values as they were given
        self._under_way = _UnderWay(values, shares, _Scatter.begin(shares, self.group, self._name), done)
        return done

    @torch.no_grad()
    def finish(self) -> None:
        one, self._under_way = self._under_way, None
        if one is None:
            return
        name = one.scatter.name
        message = encode(one.scatter.finish().unsqueeze(0), name)
        messages = message.new_empty((self.group.size(), message.shape[1]))
        with wire_format(REDUCE, name):
            _all_gather(messages.view(-1), message.view(-1), group=self.group)
        flat, count = one.values.view(-1), one.scatter.count
        for part, message in zip(
            torch.split(flat, count), torch.split(messages, 1), strict=False
        ):  # the last shares may be padding
            part.copy_(decode(message, count, name)[0, : part.numel()])
        _tell(self.group, self._name, one.given, one.values, is_scattered=False)
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


@dataclass(frozen=True)
class _UnderWay:
    """An all-reduce in its first half."""

    values: Tensor
    given: Tensor
    scatter: _Scatter
    done: torch.futures.Future[Tensor]


def _in_shares(values: Tensor, num_ranks: int) -> Tensor:
    """[ranks, count], filled up with zeros."""
    flat = values.reshape(-1).float()
    missing = -flat.numel() % num_ranks
    return (F.pad(flat, (0, missing)) if missing else flat).view(num_ranks, -1)


def _tell(group: dist.ProcessGroup, name: str, given: Tensor, received: Tensor, *, is_scattered: bool) -> None:
    for watcher in _watchers:
        watcher(CodedSumRecord(group, name, is_scattered, given, received))
