"""The two places of an update of offloaded states, chunk by chunk, with `SLOTS` chunks in flight.

device   states come in, the device's kernel updates weights and states, states leave: 8 bytes per float32 parameter and
         direction with two moments. Same kernel as without offload: same bits
host     weights and gradients leave, the host's kernel updates weights and states, weights return. Same bits as the
         optimizer on a CPU

With masters among the states the kernel updates these, and weights are their rounded copies: only gradients leave for
the host, and masters that return are rounded on the device. Weights that rest on the host are states too: they are
stored and never loaded, or rounded there.

Slots of the device form are memory of the device that exists during the update only, when activations are freed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.engine.offload.chunk_kernel import ChunkKernel, State
from weft.engine.offload.chunks import MASTER, WEIGHT, StateChunk, StatePiece
from weft.engine.offload.copy_streams import NoStreams
from weft.engine.offload.load_window import LoadWindow
from weft.engine.offload.slab import slab_bytes
from weft.engine.offload.state_store import HostStore
from weft.engine.ownership import local

HostState = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ChunkUpdate:
    """The pieces of a chunk that have a gradient, with their step counters."""

    chunk: StateChunk
    pieces: Sequence[StatePiece]
    counters: Sequence[State]


class DeviceUpdate:
    """Streams the states through the device.

    `load_ahead` brings chunks to the device before the update; these leave after it, and their memory is held until
    `release`. All other chunks pass through the slots.
    """

    def __init__(
        self,
        kernel: ChunkKernel,
        streams: NoStreams,
        *,
        store: HostStore,
        chunks: Sequence[StateChunk],
        device: torch.device,
        num_slots: int,
        keeps_slots: bool = False,
    ) -> None:
        """`keeps_slots`: their memory exists between updates too, since these run beside the computation."""
        self._kernel, self._streams, self._device, self._num_slots = kernel, streams, device, num_slots
        self._store = store
        self._keeps_slots, self.kept_slots = keeps_slots, list[torch.Tensor]()
        # slots of chunks ahead: events of their copies are not those of the slots that all other chunks share
        self._own_slot = {chunk: num_slots + number for number, chunk in enumerate(chunks)}
        self._ahead: dict[StateChunk, torch.Tensor] = {}
        self._leaving: list[tuple[int, torch.Tensor]] = []  # slot and memory, oldest first
        first_bytes = num_slots * max(map(_state_bytes, chunks), default=0)
        self._window = LoadWindow(streams, first_bytes=first_bytes)

    @torch.no_grad()
    def run(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        self.release(keep_bytes=0)
        self._window.end(self._ahead_bytes)
        others = [update for update in updates if update.chunk not in self._ahead]
        # others first: their stores free slots, and would wait for those of the chunks ahead
        self._through_slots(others, factor)
        for update in updates:
            if update.chunk in self._ahead:
                slot, memory = self._own_slot[update.chunk], self._ahead.pop(update.chunk)
                self._update(update, memory, slot, factor, self._store.fetch(update.chunk))
                self._leaving.append((slot, memory))
        self.forget()

    @torch.no_grad()
    def load_ahead(self, room_bytes: int) -> None:
        """Begin to load chunks, as many as fit into `room_bytes` of the device and arrive before the update."""
        room_bytes = self._window.limit(room_bytes, loaded_bytes=self._ahead_bytes)
        for chunk, slot in self._own_slot.items():
            size = _state_bytes(chunk)
            if chunk in self._ahead or size == 0:
                continue
            if size > room_bytes:
                return
            room_bytes -= size
            self._streams.begin()
            self._window.begin_load()
            self._ahead[chunk] = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._load(chunk, self._ahead[chunk], slot)
            self._window.end_load()

    @property
    def held_bytes(self) -> int:
        """Memory of chunks that were loaded ahead, and of updated ones that leave."""
        return self._ahead_bytes + sum(memory.nbytes for _, memory in self._leaving)

    @property
    def _ahead_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._ahead.values())

    def chunks_on_device(self) -> list[torch.Tensor]:
        """Memory of these chunks."""
        return [*self._ahead.values(), *(memory for _, memory in self._leaving)]

    def release(self, *, keep_bytes: int) -> None:
        """Free the memory of updated chunks but the last `keep_bytes`; the computation waits until they are stored."""
        leaving = sum(memory.nbytes for _, memory in self._leaving)
        while leaving > keep_bytes:
            slot, memory = self._leaving.pop(0)
            leaving -= memory.nbytes
            self._streams.computation_waits(slot, stored=True)
            del memory

    def forget(self) -> None:
        """Free chunks that were loaded ahead and not updated."""
        for chunk in list(self._ahead):
            self._streams.computation_waits(self._own_slot[chunk])
            del self._ahead[chunk]

    def _through_slots(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        count = min(self._num_slots, len(updates))
        sizes = [max(_state_bytes(update.chunk) for update in updates[slot::count]) for slot in range(count)]
        slots = self.kept_slots or [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self.kept_slots = slots if self._keeps_slots else []
        self._streams.begin()
        self._store.begin([update.chunk for update in updates])
        for index, update in enumerate(updates):
            at_host = self._load(update.chunk, slots[index % count], index % count)
            self._update(update, slots[index % count], index % count, factor, at_host)
        self._store.end()
        for slot in range(count):  # after this the slots' memory is free for the computation
            self._streams.computation_waits(slot, stored=True)

    def _load(self, chunk: StateChunk, memory: torch.Tensor, slot: int) -> HostState:
        at_host = self._store.fetch(chunk)
        here = _carve(memory, at_host)
        with self._streams.to_device(slot):
            for key, values in at_host.items():
                if key != WEIGHT:
                    here[key].copy_(values, non_blocking=True)
        return at_host

    def _update(
        self, update: ChunkUpdate, memory: torch.Tensor, slot: int, factor: torch.Tensor | None, at_host: HostState
    ) -> None:
        """Update a chunk that was loaded into `memory` from `at_host`, and begin to store it there."""
        chunk, streams = update.chunk, self._streams
        here = _carve(memory, at_host)
        streams.computation_waits(slot)
        states = _states(update, here, first=chunk.begin)
        weights = masters = _masters(update, here, first=chunk.begin)
        if masters is None:
            weights = [piece.of(piece.parameter.detach()) for piece in update.pieces]
        self._kernel.update(chunk.bank.group, update.pieces, weights or [], _gradients(update.pieces), states, factor)
        if masters is not None:
            _round(update, here, masters, first=chunk.begin)
        streams.copies_wait()
        with streams.from_device(slot):
            for key, values in at_host.items():
                values.copy_(here[key], non_blocking=True)
            self._keep_weights(chunk)
        self._store.put(chunk, functools.partial(streams.host_waits, slot))

    def _keep_weights(self, chunk: StateChunk) -> None:
        kept = self._store.weights_of(chunk)
        if kept is None:
            return
        for piece in chunk.pieces:
            piece.within(kept, chunk.begin).copy_(piece.of(piece.parameter.detach()), non_blocking=True)


class HostUpdate:
    """Brings gradients, and weights without masters, to the states. `staging`: page-locked host memory of each slot."""

    def __init__(
        self,
        kernel: ChunkKernel,
        streams: NoStreams,
        *,
        store: HostStore,
        staging: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._kernel, self._streams, self._store = kernel, streams, store
        self._staging, self._device = staging, device

    @torch.no_grad()
    def run(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        count = len(self._staging)
        factor = factor.cpu() if factor is not None else None
        arriving = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in _arriving_bytes(updates, count)
        ]
        self._streams.begin()
        self._store.begin([update.chunk for update in updates])
        sent: list[tuple[list[torch.Tensor] | None, list[torch.Tensor]]] = []
        for index, update in enumerate(updates):
            while len(sent) < min(index + count, len(updates)):
                sent.append(self._send(updates[len(sent)], len(sent) % count))
            self._streams.host_waits(index % count)
            flats = self._store.fetch(update.chunk)
            weights, gradients = sent[index]
            if weights is None:
                weights = _masters(update, flats, first=update.chunk.begin) or []
            self._update(update, weights, gradients, factor, flats)
            with self._streams.to_device(index % count):
                self._return(update, weights, arriving[index % count] if arriving else None)
            self._keep_weights(update, weights)
            self._store.put(update.chunk, functools.partial(self._streams.host_waits, index % count, loaded=True))
        self._store.end()
        self._streams.end()

    def _return(self, update: ChunkUpdate, weights: Sequence[torch.Tensor], arriving: torch.Tensor | None) -> None:
        """Copy updated values to the device: weights themselves, or masters, which are rounded there."""
        if update.chunk.bank.has_weights:
            return
        if arriving is None:
            for piece, weight in zip(update.pieces, weights, strict=True):
                piece.of(piece.parameter.detach()).copy_(weight, non_blocking=True)
            return
        chunk = update.chunk
        here = arriving[: chunk.num_elements * chunk.bank.dtype.itemsize].view(chunk.bank.dtype)
        masters = [piece.within(here, chunk.begin) for piece in update.pieces]
        for master, weight in zip(masters, weights, strict=True):
            master.copy_(weight, non_blocking=True)
        _round(update, {}, masters, first=chunk.begin)

    def _send(self, update: ChunkUpdate, slot: int) -> tuple[list[torch.Tensor] | None, list[torch.Tensor]]:
        """Host copies of the weights and gradients of a chunk, on their way; no weights where masters are states."""
        chunk, gradients, dtype = update.chunk, _gradients(update.pieces), update.chunk.bank.dtype
        size = slab_bytes(chunk.num_elements, dtype)
        has_masters = MASTER in chunk.bank.states
        end = staging_bytes(chunk, has_masters=has_masters)
        flats = [self._staging[slot][begin : begin + size].view(dtype) for begin in range(0, end, size)]
        held = [[piece.within(flat, chunk.begin) for piece in update.pieces] for flat in flats]
        with self._streams.from_device(slot):
            for copied, gradient in zip(held[0], gradients, strict=True):
                copied.copy_(gradient, non_blocking=True)
            if not has_masters:
                for piece, weight in zip(update.pieces, held[1], strict=True):
                    weight.copy_(piece.of(piece.parameter.detach()), non_blocking=True)
        return None if has_masters else held[1], held[0]

    def _update(
        self,
        update: ChunkUpdate,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        factor: torch.Tensor | None,
        flats: HostState,
    ) -> None:
        bank, first = update.chunk.bank, update.chunk.begin
        states = _states(update, flats, first=first)
        self._kernel.update(bank.group, update.pieces, weights, gradients, states, factor)
        if bank.has_weights:
            _round(update, flats, weights, first=first)

    def _keep_weights(self, update: ChunkUpdate, weights: Sequence[torch.Tensor]) -> None:
        kept, updated = self._store.weights_of(update.chunk), dict(zip(update.pieces, weights, strict=True))
        if kept is None:
            return
        for piece in update.chunk.pieces:
            value = updated.get(piece, piece.of(piece.parameter.detach()))
            piece.within(kept, update.chunk.begin).copy_(value)


def _gradients(pieces: Sequence[StatePiece]) -> list[torch.Tensor]:
    found = []
    for piece in pieces:
        if piece.parameter.grad is None:
            raise RuntimeError("a piece of a parameter without a gradient is updated")
        own = local(piece.parameter.grad)
        found.append(piece.of(own if own.is_contiguous() else own.contiguous()))
    return found


def _states(update: ChunkUpdate, flats: Mapping[str, torch.Tensor], *, first: int) -> list[State]:
    """What the kernel knows as states, piece by piece: counters and moments. `flats` begin at element `first`."""
    moments = {key: flat for key, flat in flats.items() if key not in (MASTER, WEIGHT)}
    return [
        {**counter, **update.chunk.bank.states_of(piece, moments, first=first)}
        for piece, counter in zip(update.pieces, update.counters, strict=True)
    ]


def _masters(update: ChunkUpdate, flats: Mapping[str, torch.Tensor], *, first: int) -> list[torch.Tensor] | None:
    """Masters, piece by piece; None if the weights on the device are the masters."""
    return [piece.within(flats[MASTER], first) for piece in update.pieces] if MASTER in flats else None


def _round(
    update: ChunkUpdate, flats: Mapping[str, torch.Tensor], masters: Sequence[torch.Tensor], *, first: int
) -> None:
    """Set weights at rest to their masters, rounded: in `flats`, or on the device."""
    if WEIGHT in flats:
        round_into([piece.within(flats[WEIGHT], first) for piece in update.pieces], masters)
    elif not update.chunk.bank.has_weights:
        round_into([piece.of(piece.parameter.detach()) for piece in update.pieces], masters)


def round_into(weights: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
    if weights:
        torch._foreach_copy_(list(weights), list(masters))


def staging_bytes(chunk: StateChunk, *, has_masters: bool) -> int:
    """Host memory of a chunk's gradients, and of weights that are their own masters."""
    return (1 if has_masters else 2) * slab_bytes(chunk.num_elements, chunk.bank.dtype)


def _arriving_bytes(updates: Sequence[ChunkUpdate], count: int) -> list[int]:
    """Memory of the device for masters that return from the host, by slot; empty without masters."""
    returning = [one.chunk for one in updates if MASTER in one.chunk.bank.states and not one.chunk.bank.has_weights]
    sizes = [slab_bytes(chunk.num_elements, chunk.bank.dtype) for chunk in returning]
    return [max(sizes[slot::count]) for slot in range(min(count, len(sizes)))]


def _state_bytes(chunk: StateChunk) -> int:
    sizes = ((chunk.bank.num_entries(key, chunk.num_elements), flat.dtype) for key, flat in chunk.bank.states.items())
    return sum(slab_bytes(count, dtype) for count, dtype in sizes)


def _carve(memory: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the sizes and dtypes of `like`, one behind the other in `memory`."""
    found, begin = {}, 0
    for key, flat in like.items():
        found[key] = memory[begin : begin + flat.nbytes].view(flat.dtype)
        begin += slab_bytes(flat.numel(), flat.dtype)
    return found
