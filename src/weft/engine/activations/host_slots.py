"""Host memory in slots of exact size, reused from step to step: pinned on a machine with a GPU, plain memory without.

    first step      every slot is ordinary memory: sizes and the number in use at once become known
    between steps   `settle` replaces ordinary slots by slots of one slab, allocated and pinned in one call
    later steps     slots of the slab only; a tensor larger than all free slots gets ordinary memory until `settle`

Memory is never pinned during a step: pinning waits for the device while peers wait for this rank in a collective.
torch's own pinned memory is rounded up to a power of two; a mapping of our own has the exact size.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import MemoryLimitError
from weft.core.units import format_bytes
from weft.engine.offload.host_room import available_bytes

HOST = torch.device("cpu")  # a dry run of a GPU replaces it, where a host's memory is not the device's
ALIGNMENT_BYTES = 512


@dataclass(eq=False)
class HostSlot:
    """Bytes of host memory for one tensor. `done`: the event of the last copy that reads or writes them."""

    memory: Tensor
    is_ordinary: bool
    done: Any = None
    is_replaced: bool = False  # an ordinary slot in use while its replacement was allocated

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def viewed(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.memory[: numel * dtype.itemsize].view(dtype)


class HostSlots:
    """Slots that are free and in use. Sizes repeat from step to step, so the pool stops growing after the first."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[HostSlot] = []
        self._used: set[HostSlot] = set()

    @property
    def num_slots(self) -> int:
        return len(self._free) + len(self._used)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.all_slots())

    def all_slots(self) -> list[HostSlot]:
        return [*self._free, *self._used]

    def take(self, nbytes: int) -> HostSlot:
        """The smallest free slot of at least `nbytes`; else ordinary memory, in place of a smaller free slot."""
        fitting = [slot for slot in self._free if slot.nbytes >= nbytes]
        if fitting:
            slot = min(fitting, key=lambda one: one.nbytes)
            self._free.remove(slot)
        else:
            if self._free:
                self._free.remove(max(self._free, key=lambda one: one.nbytes))
            slot = HostSlot(torch.empty(nbytes, dtype=torch.uint8, device=HOST), is_ordinary=True)
        self._used.add(slot)
        return slot

    def give(self, slot: HostSlot) -> None:
        """Free a slot. The next copy into it waits for `slot.done`."""
        self._used.discard(slot)
        if not slot.is_replaced:
            self._free.append(slot)

    def settle(self) -> None:
        """Between steps: allocate one slab for all ordinary slots; for all slots if none is in use."""
        ordinary = [slot for slot in self.all_slots() if slot.is_ordinary and not slot.is_replaced]
        if not ordinary:
            return
        replaced = self._free if not self._used else ordinary
        sizes = [slot.nbytes for slot in replaced]
        for slot in ordinary:
            slot.is_replaced = True
        self._free = [slot for slot in self._free if slot not in replaced]
        self._free += _slots_of_slab(sizes, pinned=self._pinned)


def _slots_of_slab(sizes: list[int], *, pinned: bool) -> list[HostSlot]:
    """One allocation for slots of these sizes."""
    spans = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
    total_bytes = sum(spans)
    slab = pinned_bytes(total_bytes) if pinned else torch.empty(total_bytes, dtype=torch.uint8, device=HOST)
    parts = torch.split(slab, spans)
    return [HostSlot(part[:size], is_ordinary=False) for part, size in zip(parts, sizes, strict=True)]


def pinned_bytes(nbytes: int) -> Tensor:
    """`nbytes` of page-locked memory, freed with its last view."""
    available = available_bytes()
    if available is not None and nbytes > available:
        raise _too_large(nbytes, f"{format_bytes(available)} of host memory are available")
    mapping = mmap.mmap(-1, nbytes)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
    if code:
        raise _too_large(nbytes, f"cudaHostRegister failed with code {code}")
    # the mapping ends with its last view: pages must be unlocked before
    weakref.finalize(memory.untyped_storage(), _unpin, memory.data_ptr(), mapping).atexit = False
    return memory


def _unpin(address: int, _mapping: mmap.mmap) -> None:
    torch.cuda.synchronize()  # copies in flight
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _too_large(nbytes: int, why: str) -> MemoryLimitError:
    return MemoryLimitError(
        f"offloaded activations need {format_bytes(nbytes)} of pinned host memory per rank, but {why}",
        hint="set activations.offload = 'none' or fewer activations.offload_blocks, or use fewer rows per micro-batch",
    )
