"""Copies of every rank's state in host memory: two of its own, written alternately, two for a rank of another host.

    take      clear the older copy -> copy the tensors -> checksum -> record;  then the same bytes to the neighbour
    restore   newest step of which every rank's copy is somewhere, whole, of this layout: loaded, sent if elsewhere

A rank writes over the copy of step t - k only after step t, in which every rank took part after its copy of t - k: so
whenever ranks die, all others have a common step left. Nothing is read from or written to a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.memory_file import CopyRecord, MemoryFile, StateTable
from weft.checkpoint.staging import local_shards

_MESSAGE_BYTES = 1 << 28
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Ranks of other hosts: `keeper` has the second copy of this rank's state, this rank that of `guest`."""

    keeper: int
    guest: int


@dataclass(frozen=True, kw_only=True)
class RestoredCopy:
    """`num_received`: ranks whose own host had no copy."""

    step: int
    meta: dict[str, Any]
    num_received: int

    def __str__(self) -> str:
        received = f", {self.num_received} of them from another host" if self.num_received else ""
        return f"copies in memory{received}"


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """A copy that some rank's host has."""

    holder: int
    number: int  # of its file
    record: CopyRecord


class MemoryCopies:
    """All ranks make the same calls. `files`: two for this rank's copies, and two for its guest's with `neighbours`."""

    def __init__(
        self, files: Sequence[MemoryFile], exchange: Exchange, *, layout: str, neighbours: Neighbours | None
    ) -> None:
        self._files, self._exchange, self._layout, self._neighbours = files, exchange, layout, neighbours
        self._next = 0
        self.size_bytes = 0  # of one copy
        self.notes: list[str] = []

    @property
    def num_files(self) -> int:
        return len(self._files)

    @property
    def host_bytes(self) -> int:
        """What the files of this rank take."""
        return sum(file.allocated_bytes for file in self._files)

    def take(self, state: State, meta: dict[str, Any], *, step: int) -> None:
        """Copy the state of a step. Collective with neighbours, else local."""
        shards = local_shards(state)
        table = StateTable.of(shards)
        self.size_bytes = table.size_bytes
        own = self._files[self._next]
        own.clear()
        data = own.data(table.size_bytes)
        for key, view in table.views(data).items():
            view.copy_(shards[key], non_blocking=True)
        if any(shard.is_cuda for shard in shards.values()):
            torch.cuda.current_stream().synchronize()  # otherwise the checksum is of bytes that have not arrived
        record = CopyRecord(
            step=step,
            owner=self._exchange.rank,
            layout=self._layout,
            table=table.digest,
            size_bytes=table.size_bytes,
            checksum=own.sum_of(table.size_bytes),
            meta=meta,
        )
        own.commit(record)
        if self._neighbours is not None:
            self._exchange_with(self._neighbours, data, record)
        self._next = 1 - self._next

    def restore(self, state: Callable[[], State], *, not_before: int) -> RestoredCopy | None:
        """Fill the state from the newest step, at least `not_before`, that all ranks have; clear all other copies.
        Collective. None: there is none, and `notes` say why if there were copies."""
        offers = self._offers(not_before)
        shards = local_shards(state()) if offers else {}
        table = StateTable.of(shards)
        while (chosen := _newest(offers, world_size=self._exchange.world_size)) is not None:
            problems = self._exchange.all_gather(self._problem(chosen, table))
            named = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem]
            step = chosen[0].record.step
            if not named:
                return self._load(shards, table, chosen)
            self.notes.append(f"copies in memory of step {step} are not used: {named[0]}")
            offers = [offer for offer in offers if offer.record.step != step]
        self._keep(())
        return None

    # --- a copy at another host ---------------------------------------------------------------------------------

    def _exchange_with(self, neighbours: Neighbours, data: Tensor, record: CopyRecord) -> None:
        records = [CopyRecord(**fields) for fields in self._exchange.all_gather(asdict(record))]
        of_guest = records[neighbours.guest]
        kept = self._files[2 + self._next]
        kept.clear()
        arriving = kept.data(of_guest.size_bytes)
        _transfer([(data, neighbours.keeper)], [(arriving, neighbours.guest)], self._exchange.group)
        kept.commit(of_guest)

    # --- a restart ----------------------------------------------------------------------------------------------

    def _offers(self, not_before: int) -> list[_Offer]:
        own = []
        for number, file in enumerate(self._files):
            record = file.read()
            if record is not None and record.step >= not_before and record.layout == self._layout:
                own.append({"number": number, **asdict(replace(record, meta={}))})
        found = []
        for holder, rows in enumerate(self._exchange.all_gather(own)):
            for row in rows:
                number = row.pop("number")
                found.append(_Offer(holder=holder, number=number, record=CopyRecord(**row)))
        return found

    def _problem(self, chosen: list[_Offer], table: StateTable) -> str:
        """Why a copy that this rank would give is not whole, or its own does not fit; or ""."""
        if chosen[self._exchange.rank].record.table != table.digest:
            return "they have other tensors than the model"
        for offer in chosen:
            if offer.holder == self._exchange.rank:
                problem = self._files[offer.number].problem(offer.record)
                if problem:
                    return problem
        return ""

    def _load(self, shards: State, table: StateTable, chosen: list[_Offer]) -> RestoredCopy:
        rank, own = self._exchange.rank, chosen[self._exchange.rank]
        metas = self._exchange.all_gather(
            {str(offer.record.owner): self._meta_of(offer) for offer in chosen if offer.holder == rank}
        )
        record = replace(own.record, meta=metas[own.holder][str(rank)])
        self._fetch(chosen, record)
        data = self._files[1 - self._next].data(record.size_bytes)
        for key, view in table.views(data).items():
            shards[key].copy_(view)
        num_received = sum(offer.holder != offer.record.owner for offer in chosen)
        return RestoredCopy(step=record.step, meta=record.meta, num_received=num_received)

    def _fetch(self, chosen: list[_Offer], record: CopyRecord) -> None:
        """This rank's copy is in one of its own files afterwards; the other one is written next."""
        rank = self._exchange.rank
        own = chosen[rank]
        given = [offer for offer in chosen if offer.holder == rank and offer.record.owner != rank]
        outgoing = [(self._files[offer.number].data(offer.record.size_bytes), offer.record.owner) for offer in given]
        at = own.number
        if own.holder == rank and at < 2:
            _transfer(outgoing, [], self._exchange.group)
        else:
            at = next(number for number in range(2) if number not in [offer.number for offer in given])
            self._files[at].clear()
            arriving = self._files[at].data(record.size_bytes)
            if own.holder == rank:
                arriving.copy_(self._files[own.number].data(record.size_bytes))
            incoming = [(arriving, own.holder)] if own.holder != rank else []
            _transfer(outgoing, incoming, self._exchange.group)
            self._files[at].commit(record)
        self._keep((at, *(offer.number for offer in given)))
        self._next = 1 - at

    def _meta_of(self, offer: _Offer) -> dict[str, Any]:
        record = self._files[offer.number].read()
        if record is None:
            raise RuntimeError("a copy in memory lost its record")
        return record.meta

    def _keep(self, numbers: Sequence[int]) -> None:
        """Clear other copies: they are of steps that will be made again."""
        for number, file in enumerate(self._files):
            if number not in numbers:
                file.clear()


def _newest(offers: list[_Offer], *, world_size: int) -> list[_Offer] | None:
    """By owner the copy to load, of the newest step that has one for each; the same on every rank."""
    for step in sorted({offer.record.step for offer in offers}, reverse=True):
        of_step = [offer for offer in offers if offer.record.step == step]
        found = [
            min(
                (offer for offer in of_step if offer.record.owner == owner),
                key=lambda offer: (offer.holder != offer.record.owner, offer.holder, offer.number),
                default=None,
            )
            for owner in range(world_size)
        ]
        whole = [offer for offer in found if offer is not None]
        if len(whole) == world_size:
            return whole
    return None


def _transfer(
    outgoing: list[tuple[Tensor, int]], incoming: list[tuple[Tensor, int]], group: dist.ProcessGroup | None
) -> None:
    """Send and receive bytes; peers are ranks of the group."""
    waiting = []
    for data, peer in incoming:
        for part in torch.split(data, _MESSAGE_BYTES):
            waiting.append(dist.irecv(part, group=group, group_src=peer))
    for data, peer in outgoing:
        for part in torch.split(data, _MESSAGE_BYTES):
            waiting.append(dist.isend(part, group=group, group_dst=peer))
    for work in waiting:
        if work is not None:
            work.wait()
