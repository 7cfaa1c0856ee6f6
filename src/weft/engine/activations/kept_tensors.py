"""Saved tensors of chosen blocks that are not recomputed: on the host between forward and backward.

    forward of chosen block i     copies of what autograd saves leave on a stream of their own
    end of chosen block i + 1     the device's memory of block i is free
    backward of chosen block i    tensors of block i - 1 return, one chosen block ahead

So the device has the tensors of one chosen block while no chosen block computes, and of two while one does. The last
one of a forward never leaves. Tensors are copied by storage: views, and a tensor saved twice, are one copy each way.
Weights, casts of them, tensors that all blocks share (masks, rotary tables) and small ones stay where they are.

Memory of the device is allocated and freed by the stream of the computation, which waits for a copy before it frees
what the copy reads, or reads what the copy writes. Slots of host memory are given back when the backward has used them;
the next copy into a slot waits for the last one out of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from weft.core.errors import NotBuiltError, PlanError
from weft.core.memory_sections import Activations
from weft.core.mixture import block_policies, offloaded_blocks
from weft.engine.activations.host_link import HostLink
from weft.engine.activations.host_slots import HostSlot, HostSlots
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.layout import ModelLayout

LEAST_BYTES = 2**20  # a smaller copy costs more time to start than to make


class KeptStorage:
    """One storage. `local`: on the device, flat; `slot`: on the host. `version`: autograd's count of changes in place,
    while `local` is the memory that the block saved."""

    def __init__(self, flat: Tensor, owner: KeptTensors) -> None:
        self.local: Tensor | None = flat
        self.numel, self.dtype, self.device = flat.numel(), flat.dtype, flat.device
        self.version: int | None = flat._version
        self.slot: HostSlot | None = None
        self.busy: Any = None  # the event of a copy that still reads or writes `local`
        self._owner = owner

    def __del__(self) -> None:
        self._owner.release(self)


class KeptBlock:
    """The storages of one forward of a chosen block, in the order in which they were saved."""

    def __init__(self, block: nn.Module, shared: set[int], before: KeptBlock | None) -> None:
        self.block, self.shared = block, shared
        self.before = weakref.ref(before) if before is not None else None
        self.storages: list[weakref.ref[KeptStorage]] = []
        self.is_asked = False  # in the backward

    def kept(self) -> Iterator[KeptStorage]:
        """Those whose backward is not done, the last one first."""
        for reference in reversed(self.storages):
            storage = reference()
            if storage is not None:
                yield storage


@dataclass(slots=True)
class _Away:
    """A saved tensor: a view of a kept storage."""

    storage: KeptStorage
    block: KeptBlock
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True)
class _Here:
    """A saved tensor that stays, and its version: autograd checks none where there are hooks."""

    tensor: Tensor
    version: int


class KeptTensors:
    """The saved tensors that a rank keeps on its host. `begin_forward` before each forward of a micro-batch."""

    def __init__(self, *, slots: HostSlots, link: HostLink) -> None:
        self.num_kept = 0  # storages, since the engine was built
        self._slots, self._link = slots, link
        self._newest: weakref.ref[KeptBlock] | None = None
        self._seen: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[KeptStorage]]] = {}
        self._alive: weakref.WeakSet[KeptStorage] = weakref.WeakSet()

    def begin_forward(self) -> None:
        """Another micro-batch: its first chosen block has no predecessor."""
        self._newest = None
        self._seen.clear()

    def device_tensors(self) -> list[Tensor]:
        return [kept.local for kept in self._alive if kept.local is not None]

    @contextmanager
    def saved_by(self, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around the forward of a chosen block."""
        before = self._newest() if self._newest is not None else None
        found = KeptBlock(block, _shared(args, kwargs), before)
        self._newest = weakref.ref(found)
        with saved_tensors_hooks(functools.partial(self._pack, found), self._unpack):
            yield
        for kept in before.kept() if before is not None else ():
            self._free(kept)

    def release(self, kept: KeptStorage) -> None:
        """The backward is done, or will never be: give the slot back."""
        self._await(kept)
        if kept.slot is not None:
            self._slots.give(kept.slot)
            kept.slot = None

    def _pack(self, block: KeptBlock, tensor: Tensor) -> _Away | _Here:
        kept = self._keep(block, tensor) if _may_leave(tensor) else None
        if kept is None:
            return _Here(tensor, tensor._version)
        return _Away(kept, block, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _keep(self, block: KeptBlock, tensor: Tensor) -> KeptStorage | None:
        """The storage of `tensor` until the backward; None: it stays."""
        storage = tensor.untyped_storage()
        key = (id(storage), tensor._version)
        source, known = self._seen.get(key, (None, None))
        kept = known() if known is not None and source is not None and source() is storage else None
        if kept is not None:
            return kept
        if storage._cdata in block.shared or storage._cdata in _storages(_weights(block.block)):
            return None
        with torch.no_grad():
            kept = self._send(tensor, storage.nbytes() // tensor.dtype.itemsize)
        self._seen[key] = (weakref.ref(storage), weakref.ref(kept))
        block.storages.append(weakref.ref(kept))
        self._alive.add(kept)
        self.num_kept += 1
        return kept

    def _send(self, tensor: Tensor, numel: int) -> KeptStorage:
        kept = KeptStorage(tensor.detach().as_strided((numel,), (1,), 0), self)
        assert kept.local is not None
        kept.slot = self._slots.take(kept.local.nbytes)
        self._link.send(kept.local, kept.slot)
        kept.busy = kept.slot.done
        return kept

    def _unpack(self, packed: _Away | _Here) -> Tensor:
        if isinstance(packed, _Here):
            _require_unchanged(packed.tensor, packed.version)
            return packed.tensor
        kept, block = packed.storage, packed.block
        if not block.is_asked:
            block.is_asked = True
            before = block.before() if block.before is not None else None
            for one in (*block.kept(), *(before.kept() if before is not None else ())):
                self._bring(one)
        self._bring(kept)
        self._await(kept)
        if kept.local is None:
            raise RuntimeError("a saved tensor was freed before its backward")
        if kept.version is not None:
            _require_unchanged(kept.local, kept.version)
        return kept.local.view(packed.dtype).as_strided(packed.size, packed.stride, packed.offset)

    def _bring(self, kept: KeptStorage) -> None:
        """Begin to copy a storage back to the device."""
        if kept.local is not None or kept.slot is None:
            return
        with torch.no_grad():
            kept.local = torch.empty(kept.numel, dtype=kept.dtype, device=kept.device)
            self._link.bring(kept.slot, kept.local)
        kept.busy = kept.slot.done

    def _free(self, kept: KeptStorage) -> None:
        """Free the device's memory of a storage that has left."""
        if kept.local is None or kept.version is None:
            return
        _require_unchanged(kept.local, kept.version)
        self._await(kept)
        kept.local = kept.version = None

    def _await(self, kept: KeptStorage) -> None:
        """The computation waits for the copy of `kept.local`."""
        self._link.wait(kept.busy)
        kept.busy = None


def apply_kept_tensors(
    model: nn.Module, layout: ModelLayout, activations: Activations, tensors: KeptTensors | None
) -> None:
    """Wrap the chosen blocks of `layout`, around everything that they save."""
    if tensors is None:
        return
    policies = block_policies(activations.policy, activations.mixture, num_blocks=len(layout.blocks))
    num_kept = policies.count("none")
    number = activations.offload_blocks
    if number == "auto":
        raise PlanError(
            "activations.offload_blocks = 'auto' was not chosen",
            hint="weft train, dryrun and bench choose it for the device; otherwise set a number of blocks",
        )
    if number > num_kept:
        raise PlanError(
            f"activations.offload_blocks = {number}, but {num_kept} blocks are not recomputed",
            hint=f"set a number from 0 to {num_kept}",
        )
    for index in offloaded_blocks(policies, number):
        block = model.get_submodule(layout.blocks[index])
        wrap_forward(block, _Kept(block, tensors))


class _Kept:
    """The layer around one block's forward."""

    def __init__(self, block: nn.Module, tensors: KeptTensors) -> None:
        self._block, self._tensors = block, tensors

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self._tensors.saved_by(self._block, args, kwargs):
            return forward(*args, **kwargs)


def _may_leave(tensor: Tensor) -> bool:
    """Large dense memory of the device, of elements that fill it."""
    if tensor.layout != torch.strided or _is_wrapper(tensor):
        return False
    nbytes = tensor.untyped_storage().nbytes()
    return nbytes >= LEAST_BYTES and nbytes % tensor.dtype.itemsize == 0


def _weights(block: nn.Module) -> list[Tensor]:
    """What the block computes with now: parameters, gathered ones, or casts in their place; and buffers."""
    held = [value for module in block.modules() for value in (*module._parameters.values(), *module._buffers.values())]
    return [value for value in held if value is not None]


def _shared(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """Storages of arguments that belong to all blocks: those without a gradient, except hidden states."""
    given = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, Tensor)]
    hidden = next((value for value in given if value.is_floating_point()), None)
    return _storages(value for value in given if value is not hidden and not value.requires_grad)


def _storages(tensors: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors if not _is_wrapper(tensor)}


def _is_wrapper(tensor: Any) -> bool:
    """Whether a tensor has no memory of its own, as a DTensor."""
    return is_traceable_wrapper_subclass(tensor)


def _require_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise NotBuiltError(
            "a block changes a tensor in place that its backward needs",
            hint="set activations.offload_blocks = 0; if it fails there too, the model itself does this",
        )
