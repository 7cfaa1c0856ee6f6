"""Delayed updates of offloaded states: the update by one step's gradients runs beside the next step and lands after it.

    step t        forward and backward read the weights of the updates up to step t - 2
    end of t      new weights of step t - 1 land; then the update by the gradients of step t begins

An update in flight holds one tensor per parameter: its gradient, which the kernel's result replaces. An update has the
learning rates, norm and clip factor of its own step, and starts from the weights that have just landed. `land` at any
other time lands the same bits: training then continues from the newest weights.

device   gradients stay on the device; chunks of states stream through it on a stream beside the computation
host     gradients leave for host memory; a thread updates them there, chunk by chunk, with weights that it reads from
         the device; new weights return when they land
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode

from weft.engine.offload.chunk_kernel import ChunkKernel, State
from weft.engine.offload.chunks import StateBank, StateChunk, StatePiece
from weft.engine.offload.copy_streams import NoStreams
from weft.engine.offload.slab import slab_bytes
from weft.engine.offload.updates import ChunkUpdate, DeviceUpdate
from weft.engine.ownership import local


class IntoGradients(ChunkKernel):
    """A kernel that leaves weights as they are: the new ones replace the gradients. `fresh`: memory of a chunk's."""

    fresh: torch.Tensor

    @torch.no_grad()
    def update(
        self,
        group: dict[str, Any],
        pieces: Sequence[StatePiece],
        weights: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        states: Sequence[State],
        factor: torch.Tensor | None,
    ) -> None:
        new, begin = [], 0
        for weight in weights:
            new.append(self.fresh[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight))
            begin += slab_bytes(weight.numel(), weight.dtype)
        super().update(group, pieces, new, gradients, states, factor)
        for gradient, weight in zip(gradients, new, strict=True):
            gradient.copy_(weight)


class DelayedOnDevice:
    """Runs `update` with `kernel` beside the computation.

    `buckets`: memory of gradients that the next step writes to (DDP's); gradients are copied if there is any.
    """

    def __init__(
        self,
        update: DeviceUpdate,
        kernel: IntoGradients,
        *,
        chunks: Sequence[StateChunk],
        device: torch.device,
        buckets: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self._update, self._device, self._buckets = update, device, buckets
        self._kernel = kernel
        kernel.fresh = torch.empty(max(map(_fresh_bytes, chunks), default=0), dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pending: dict[nn.Parameter, torch.Tensor] = {}
        self._read: list[Any] = []  # counters and factor: freed earlier, the computation would write to their memory

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Those of the update in flight."""
        return list(self._pending.values())

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [self._kernel.fresh, *self._update.kept_slots]

    @torch.no_grad()
    def run(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        """Begin an update, after the one before has landed."""
        parameters = dict.fromkeys(piece.parameter for update in updates for piece in update.pieces)
        own = {parameter: parameter.grad for parameter in parameters}
        is_kept = len(self._buckets()) > 0
        for parameter, gradient in own.items():
            if gradient is not None and (is_kept or not local(gradient).is_contiguous()):
                parameter.grad = gradient.clone(memory_format=torch.contiguous_format)
            self._pending[parameter] = local(parameter.grad)  # type: ignore[arg-type]
        self._read = [updates, factor]
        self._beside(lambda: self._update.run(updates, factor))
        for parameter, gradient in own.items():
            parameter.grad = gradient

    @torch.no_grad()
    def land(self) -> None:
        """The weights of the update in flight replace those of the model."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for parameter, new in self._pending.items():
            local(parameter.detach()).copy_(new)
        self._pending.clear()
        self._read.clear()

    def _beside(self, issue: Callable[[], None]) -> None:
        if self._stream is None:
            issue()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            issue()


class DelayedOnHost:
    """Updates in a thread. `pending`: host memory of each bank's gradients; `staging`: of a chunk's weights, by slot;
    `factor`: of a clip factor."""

    def __init__(
        self,
        kernel: ChunkKernel,
        streams: NoStreams,
        *,
        chunks: Sequence[StateChunk],
        pending: Mapping[int, torch.Tensor],
        staging: Sequence[torch.Tensor],
        factor: torch.Tensor,
        device: torch.device,
    ) -> None:
        """`pending` is keyed by the bank's `id`."""
        self._kernel, self._streams, self._pending, self._staging = kernel, streams, pending, staging
        # a slot per chunk: its gradient leaves once its weight has come, while other weights still come
        self._slot_of = {chunk: len(staging) + number for number, chunk in enumerate(chunks)}
        self._factor = factor
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-update", initializer=_on(device))
        self._updates: Sequence[ChunkUpdate] = ()
        self._future: Future[None] | None = None

    gradients: Sequence[torch.Tensor] = ()  # they are on the host, and no buffer is on the device
    buffers: Sequence[torch.Tensor] = ()

    @torch.no_grad()
    def run(self, updates: Sequence[ChunkUpdate], factor: torch.Tensor | None) -> None:
        """Begin an update, after the one before has landed: `land` has made copies wait for the gradients."""
        gradients = {piece.parameter: piece.parameter.grad for update in updates for piece in update.pieces}
        flat = {parameter: local(gradient) for parameter, gradient in gradients.items() if gradient is not None}
        if not all(gradient.is_contiguous() for gradient in flat.values()):
            flat = {parameter: gradient.contiguous() for parameter, gradient in flat.items()}
            self._streams.copies_wait()
        for update in updates:
            with self._streams.from_device(self._slot_of[update.chunk]):
                for piece in update.pieces:
                    self._new(update, piece).copy_(piece.of(flat[piece.parameter]), non_blocking=True)
        if factor is not None and updates:
            with self._streams.from_device(self._slot_of[updates[-1].chunk]):
                self._factor.copy_(factor, non_blocking=True)
        for update in updates:  # the memory of gradients is the computation's again
            self._streams.computation_waits(self._slot_of[update.chunk], stored=True)
        self._updates = updates
        groups = {id(update.chunk.bank): _frozen(update.chunk.bank.group) for update in updates}
        work = (updates, groups, None if factor is None else self._factor)
        if active_fake_mode() is None:
            self._future = self._worker.submit(self._update_all, *work)
        else:
            self._update_all(*work)  # a thread has no fake mode

    @torch.no_grad()
    def land(self) -> None:
        """Wait for the thread, whose error is raised here; its weights replace those of the model."""
        future, self._future = self._future, None
        if future is not None:
            future.result()
        updates, self._updates = self._updates, ()
        self._streams.begin()
        for update in updates:
            with self._streams.to_device(self._slot_of[update.chunk]):
                for piece in update.pieces:
                    piece.of(piece.parameter.detach()).copy_(self._new(update, piece), non_blocking=True)
        self._streams.end()

    def _new(self, update: ChunkUpdate, piece: StatePiece) -> torch.Tensor:
        """The gradient of a piece, and its new weight after the update."""
        return piece.within(self._pending[id(update.chunk.bank)], 0)

    @torch.no_grad()
    def _update_all(
        self, updates: Sequence[ChunkUpdate], groups: Mapping[int, dict[str, Any]], factor: torch.Tensor | None
    ) -> None:
        count = len(self._staging)
        sent: list[list[torch.Tensor]] = []
        for index, update in enumerate(updates):
            while len(sent) < min(index + count, len(updates)):
                sent.append(self._send(updates[len(sent)], len(sent) % count))
            self._streams.host_waits(self._slot_of[update.chunk])
            self._streams.host_waits(index % count)
            gradients = [self._new(update, piece) for piece in update.pieces]
            bank = update.chunk.bank
            states = [
                {**counter, **bank.states_of(piece, bank.states, first=0)}
                for piece, counter in zip(update.pieces, update.counters, strict=True)
            ]
            self._kernel.update(groups[id(update.chunk.bank)], update.pieces, sent[index], gradients, states, factor)
            for gradient, weight in zip(gradients, sent[index], strict=True):
                gradient.copy_(weight)

    def _send(self, update: ChunkUpdate, slot: int) -> list[torch.Tensor]:
        """The weights of a chunk, on their way: after its gradients on the same stream, so they have landed."""
        chunk = update.chunk
        flat = self._staging[slot][: chunk.num_elements * chunk.bank.dtype.itemsize].view(chunk.bank.dtype)
        weights = [piece.within(flat, chunk.begin) for piece in update.pieces]
        with self._streams.from_device(slot):
            for piece, weight in zip(update.pieces, weights, strict=True):
                weight.copy_(piece.of(piece.parameter.detach()), non_blocking=True)
        return weights


def pending_bytes(banks: Sequence[StateBank]) -> int:
    """Host memory of the gradients of a delayed update on the host, and of its clip factor."""
    return sum(slab_bytes(bank.num_elements, bank.dtype) for bank in banks) + slab_bytes(1, torch.float32)


def _fresh_bytes(chunk: StateChunk) -> int:
    return sum(slab_bytes(piece.end - piece.begin, chunk.bank.dtype) for piece in chunk.pieces)


def weight_bytes(chunk: StateChunk) -> int:
    return slab_bytes(chunk.num_elements, chunk.bank.dtype)


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """The group's constants now: the next step sets other rates while the thread reads these."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _on(device: torch.device) -> Callable[[], None]:
    """The current device is one of each thread: that of this one."""
    if device.type != "cuda" or active_fake_mode() is not None:
        return lambda: None
    current = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(current)
