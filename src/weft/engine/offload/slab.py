"""`HostSlab`: one block of host memory for offloaded states, page-locked for a GPU, allocated once before training.

It is one registered block, never many pinned tensors: torch rounds each of those up to a power of two, and an
allocation of pinned memory inside a hook waits for the device while other ranks wait for this one.
Slabs are not memory of the device, also where the device is a CPU: `is_host_memory` says so to trackers and ledgers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from weft.core.errors import DeviceError
from weft.core.units import format_bytes

ALIGNMENT_BYTES = 256

_storages: set[int] = set()  # of living slabs
_releases: dict[int, Callable[[], None]] = {}  # of storages that are a file's
_is_allocating = False


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a slab, or in the one that is being allocated."""
    if _is_allocating or not _storages:
        return _is_allocating
    given: Any = tensor  # wrappers have no storage of their own, and none is in a slab
    return not is_traceable_wrapper_subclass(given) and tensor.untyped_storage()._cdata in _storages


def release_of(tensor: torch.Tensor) -> Callable[[], None] | None:
    """What frees the pages of host memory that is a file's."""
    return _releases.get(tensor.untyped_storage()._cdata)


class HostMemory:
    """Tensors besides slabs that are host memory, for as long as this object lives."""

    def __init__(self) -> None:
        self._keys: dict[int, torch.Tensor] = {}
        weakref.finalize(self, _forget, self._keys)

    def add(self, tensor: torch.Tensor, release: Callable[[], None]) -> None:
        """`release` frees its pages until it is read again."""
        key = tensor.untyped_storage()._cdata
        self._keys[key] = tensor  # alive: the key of a freed storage may be given to another
        _storages.add(key)
        _releases[key] = release


class HostSlab:
    """`nbytes` of zeros; `take` gives them away from the beginning."""

    def __init__(self, nbytes: int, *, device: torch.device, alignment_bytes: int = 1) -> None:
        """`alignment_bytes`: the memory begins at a multiple of it."""
        with _allocating():
            self._memory = torch.zeros(nbytes + alignment_bytes - 1, dtype=torch.uint8)
            if alignment_bytes > 1:
                skipped = -self._memory.data_ptr() % alignment_bytes
                self._memory = self._memory[skipped : skipped + nbytes]
        self._taken = 0
        key = self._memory.untyped_storage()._cdata
        _storages.add(key)
        pointer = _pin(self._memory) if device.type == "cuda" and nbytes and active_fake_mode() is None else None
        release = weakref.finalize(self, _release, key, pointer)
        release.atexit = False  # the driver may be gone by then, and the memory is freed in any case

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `num_elements`, aligned."""
        begin, self._taken = self._taken, self._taken + slab_bytes(num_elements, dtype)
        return self._memory[begin : begin + num_elements * dtype.itemsize].view(dtype)


def slab_bytes(num_elements: int, dtype: torch.dtype) -> int:
    """The bytes that `take` needs."""
    return -(-num_elements * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@contextmanager
def _allocating() -> Iterator[None]:
    global _is_allocating
    _is_allocating = True
    try:
        yield
    finally:
        _is_allocating = False


def _pin(memory: torch.Tensor) -> int:
    storage = memory.untyped_storage()  # from its begin: torch asks there whether a tensor is page-locked
    pointer = storage.data_ptr()
    code = int(_cudart().cudaHostRegister(pointer, storage.nbytes(), 0))
    if code != 0:
        raise DeviceError(
            f"the driver refused to page-lock {format_bytes(memory.nbytes)} of host memory (CUDA error {code})",
            hint="raise the limit of locked memory (ulimit -l unlimited), or set offload.optimizer = 'none'",
        )
    return pointer


def _forget(keys: dict[int, torch.Tensor]) -> None:
    _storages.difference_update(keys)
    for key in keys:
        _releases.pop(key, None)
    keys.clear()


def _release(key: int, pointer: int | None) -> None:
    _storages.discard(key)
    if pointer is not None:
        torch.cuda.synchronize()  # copies in flight still use it
        _cudart().cudaHostUnregister(pointer)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
