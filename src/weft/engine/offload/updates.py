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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.engine.offload.chunk_kernel import ChunkKernel, State
from weft.engine.offload.chunks import MASTER, WEIGHT, StateChunk, StatePiece
from weft.engine.offload.copy_streams import NoStreams
from weft.engine.offload.load_window import LoadWindow
from weft.engine.offload.slab import slab_bytes
from weft.engine.ownership import local


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
        chunks: Sequence[StateChunk],
        device: torch.device,
        num_slots: int,
    ) -> None:
        self._kernel, self._streams, self._device, self._num_slots = kernel, streams, device, num_slots
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
                self._update(update, memory, slot, factor)
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
        slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]
        self._streams.begin()
        for index, update in enumerate(updates):
            self._load(update.chunk, slots[index % count], index % count)
            self._update(update, slots[index % count], index % count, factor)
        for slot in range(count):  # after this the slots' memory is free for the computation
            self._streams.computation_waits(slot, stored=True)

    def _load(self, chunk: StateChunk, memory: torch.Tensor, slot: int) -> None:
        at_host = _at_host(chunk)
        here = _carve(memory, at_host)
        with self._streams.to_device(slot):
            for key, values in at_host.items():
                if key != WEIGHT:
                    here[key].copy_(values, non_blocking=True)

    def _update(self, update: ChunkUpdate, memory: torch.Tensor, slot: int, factor: torch.Tensor | None) -> None:
        """Update a chunk that was loaded into `memory`, and begin to store it."""
        chunk, streams = update.chunk, self._streams
        at_host = _at_host(chunk)
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


class HostUpdate:
    """Brings gradients, and weights without masters, to the states. `staging`: page-locked host memory of each slot."""

    def __init__(
        self, kernel: ChunkKernel, streams: NoStreams, *, staging: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._kernel, self._streams, self._staging, self._device = kernel, streams, staging, device

    @torch.no_grad()
    def run(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        count = len(self._staging)
        factor = factor.cpu() if factor is not None else None
        arriving = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for size in _arriving_bytes(updates, count)
        ]
        self._streams.begin()
        sent: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        for index, update in enumerate(updates):
            while len(sent) < min(index + count, len(updates)):
                sent.append(self._send(updates[len(sent)], len(sent) % count))
            self._streams.host_waits(index % count)
            weights, gradients = sent[index]
            self._update(update, weights, gradients, factor)
            with self._streams.to_device(index % count):
                self._return(update, weights, arriving[index % count] if arriving else None)
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

    def _send(self, update: ChunkUpdate, slot: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Host memory of the values and gradients of a chunk: masters, and copies on their way of all others."""
        chunk, gradients, dtype = update.chunk, _gradients(update.pieces), update.chunk.bank.dtype
        size = slab_bytes(chunk.num_elements, dtype)
        masters = _masters(update, chunk.bank.states, first=0)
        end = staging_bytes(chunk, has_masters=masters is not None)
        flats = [self._staging[slot][begin : begin + size].view(dtype) for begin in range(0, end, size)]
        held = [[piece.within(flat, chunk.begin) for piece in update.pieces] for flat in flats]
        with self._streams.from_device(slot):
            for copied, gradient in zip(held[0], gradients, strict=True):
                copied.copy_(gradient, non_blocking=True)
            if masters is None:
                for piece, weight in zip(update.pieces, held[1], strict=True):
                    weight.copy_(piece.of(piece.parameter.detach()), non_blocking=True)
        return held[1] if masters is None else masters, held[0]

    def _update(
        self,
        update: ChunkUpdate,
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        factor: torch.Tensor | None,
    ) -> None:
        bank = update.chunk.bank
        states = _states(update, bank.states, first=0)
        self._kernel.update(bank.group, update.pieces, weights, gradients, states, factor)
        if bank.has_weights:
            _round(update, bank.states, weights, first=0)


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
        {**counter, **{key: piece.within(flat, first) for key, flat in moments.items()}}
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
    torch._foreach_copy_(list(weights), list(masters))


def staging_bytes(chunk: StateChunk, *, has_masters: bool) -> int:
    """Host memory of a chunk's gradients, and of weights that are their own masters."""
    return (1 if has_masters else 2) * slab_bytes(chunk.num_elements, chunk.bank.dtype)


def _arriving_bytes(updates: Sequence[ChunkUpdate], count: int) -> list[int]:
    """Memory of the device for masters that return from the host, by slot; empty without masters."""
    returning = [one.chunk for one in updates if MASTER in one.chunk.bank.states and not one.chunk.bank.has_weights]
    sizes = [slab_bytes(chunk.num_elements, chunk.bank.dtype) for chunk in returning]
    return [max(sizes[slot::count]) for slot in range(min(count, len(sizes)))]


def _at_host(chunk: StateChunk) -> dict[str, torch.Tensor]:
    return {key: flat[chunk.begin : chunk.end] for key, flat in chunk.bank.states.items()}


def _state_bytes(chunk: StateChunk) -> int:
    return sum(slab_bytes(chunk.num_elements, flat.dtype) for flat in chunk.bank.states.values())


def _carve(memory: torch.Tensor, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the sizes and dtypes of `like`, one behind the other in `memory`."""
    found, begin = {}, 0
    for key, flat in like.items():
        found[key] = memory[begin : begin + flat.nbytes].view(flat.dtype)
        begin += slab_bytes(flat.numel(), flat.dtype)
    return found
