"""Inputs of fully recomputed blocks between the two forwards of a block: on the host, or one share per tp rank.

    activations.offload      a copy leaves on a stream of its own while the block computes; the device's memory is free
                             when the next block ends. It returns while the block after it is recomputed.
    activations.partition    a tp rank keeps a copy of 1/tp of the input, and gathers it in the backward (ZeRO-R)
    both                     the share leaves and returns, and is gathered when its block is recomputed

The last input of a forward is still on the device when its backward begins, and is used from there. So the device has
two inputs at a time: the one in use, and the one that leaves or returns. Blocks know their predecessor in their own
forward, so any number of micro-batches may be in flight, in any order.

Memory of the device is allocated and freed by the stream of the computation. That stream waits for a copy before it
frees what the copy reads, or reads what the copy writes; `record_stream` would free memory at an unknown time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import NotBuiltError
from weft.core.memory_sections import Activations
from weft.engine.activations.host_link import HostLink
from weft.engine.activations.host_slots import HostSlot, HostSlots
from weft.engine.activations.input_partition import InputPartition
from weft.engine.activations.kept_tensors import KeptTensors


@dataclass(frozen=True, kw_only=True)
class InputForm:
    """The form of an input, which the recomputed one has too: a compiled block must find the same guards."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> InputForm:
        return cls(
            size=tensor.shape,
            stride=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    @property
    def numel(self) -> int:
        return self.size.numel()

    @property
    def extents(self) -> list[tuple[int, int]]:
        """(stride, elements of all smaller strides) of every dimension: equal in a tensor that fills its memory."""
        found, extent = [], 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size > 1:
                found.append((stride, extent))
                extent = stride * size
        return found

    @property
    def is_dense(self) -> bool:
        return all(stride == extent for stride, extent in self.extents)

    @property
    def overlaps(self) -> bool:
        """Whether elements share memory, as in an expanded tensor."""
        return any(stride < extent for stride, extent in self.extents)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def restored(self, flat: Tensor) -> Tensor:
        """The values of `flat` in this form; no copy if the form is dense."""
        if self.is_dense:
            return flat.as_strided(self.size, self.stride)
        return self.empty().copy_(flat.view(self.size))


class KeptInput:
    """One input. `local`: on the device, flat, the input or this rank's share; `slot`: on the host, until it is back.

    `version`: autograd's count of changes in place, if `local` is the memory of the block's own input.
    """

    def __init__(self, form: InputForm, owner: KeptInputs) -> None:
        self.form, self._owner = form, owner
        self.version: int | None = None
        self.local: Tensor | None = None
        self.slot: HostSlot | None = None
        self.busy: Any = None  # the event of a copy that still reads or writes `local`

    def __del__(self) -> None:
        if self.slot is not None:  # a forward without a backward
            self._owner.release(self)


class BlockInputs:
    """The arguments of one forward of a block, with `KeptInput` in place of the tensors that are kept."""

    def __init__(self, owner: KeptInputs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._owner = owner
        self._first: tuple[Sequence[Any], Mapping[str, Any]] | None = (args, kwargs)
        self.before: weakref.ref[BlockInputs] | None = None  # of the block before, in the same forward
        chosen = _chosen(args, kwargs)
        self._args = [owner.keep(value) if id(value) in chosen else value for value in args]
        self._kwargs = {key: owner.keep(value) if id(value) in chosen else value for key, value in kwargs.items()}

    @property
    def kept(self) -> list[KeptInput]:
        values = (*self._args, *self._kwargs.values())
        return list(dict.fromkeys(value for value in values if isinstance(value, KeptInput)))

    def device_mark(self) -> Tensor:
        """An empty tensor on the device of the inputs."""
        return torch.empty(0, device=next((kept.form.device for kept in self.kept), None))

    def take(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments: the given ones in the first forward, equal ones in a recomputed forward."""
        first, self._first = self._first, None
        if first is not None:
            return first
        found = {kept: self._owner.fetch(kept) for kept in self.kept}
        before = self.before() if self.before is not None else None
        for kept in before.kept if before is not None else ():
            self._owner.bring(kept)

        def value(argument: Any) -> Any:
            return found[argument] if isinstance(argument, KeptInput) else argument

        return [value(one) for one in self._args], {key: value(one) for key, one in self._kwargs.items()}


def build_kept_inputs(
    activations: Activations, groups: Sequence[dist.ProcessGroup], *, device: torch.device
) -> KeptInputs:
    """`groups`: those of tensor parallelism, the one of all its ranks first."""
    group = groups[0] if activations.partition else None
    found = KeptInputs(device=device, offloads=activations.offload == "cpu", group=group)
    if activations.offload_blocks:
        found.keep_tensors()
    return found


class KeptInputs:
    """The inputs that a rank keeps. `begin_forward` before each forward, `finish_step` after each step."""

    def __init__(self, *, device: torch.device, offloads: bool, group: dist.ProcessGroup | None) -> None:
        """`group`: the ranks that share one input, or None."""
        self.slots = HostSlots(pinned=device.type == "cuda")
        self.num_kept = 0  # since the engine was built
        self.tensors: KeptTensors | None = None  # of further blocks, in the same slots
        self._link = HostLink(device) if offloads else None
        self._partition = InputPartition(group) if group is not None else None
        self._leaving: deque[KeptInput] = deque()
        self._num_older = 0  # of `_leaving`, when the current block began
        self._newest: weakref.ref[BlockInputs] | None = None
        self._alive: weakref.WeakSet[KeptInput] = weakref.WeakSet()
        self._seen: dict[Any, tuple[weakref.ref[Any], weakref.ref[KeptInput]]] = {}

    @property
    def is_on(self) -> bool:
        """Whether inputs are kept here; otherwise autograd keeps them, on the device."""
        return self._link is not None or self._partition is not None

    def keep_tensors(self) -> None:
        """Also keep the saved tensors of further blocks."""
        if self._link is None:
            raise RuntimeError("saved tensors leave only with activations.offload")
        self.tensors = KeptTensors(slots=self.slots, link=self._link)

    def begin_forward(self) -> None:
        """Another micro-batch: its first block has no predecessor."""
        self._newest = None
        self._seen.clear()
        if self.tensors is not None:
            self.tensors.begin_forward()

    def finish_step(self) -> None:
        """Allocate host memory, outside of every hook."""
        self.slots.settle()

    def device_tensors(self) -> list[Tensor]:
        """Inputs, or shares of inputs, and saved tensors of further blocks that are on the device now."""
        tensors = self.tensors.device_tensors() if self.tensors is not None else []
        return [*(kept.local for kept in self._alive if kept.local is not None), *tensors]

    def host_tensors(self) -> list[Tensor]:
        return [slot.memory for slot in self.slots.all_slots()]

    def of_block(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockInputs:
        """Keep the inputs of a block whose first forward begins."""
        self._num_older = len(self._leaving)
        found = BlockInputs(self, args, kwargs)
        found.before, self._newest = self._newest, weakref.ref(found)
        return found

    def after_block(self, inputs: BlockInputs) -> None:
        """After the first forward of a block: free the inputs of the block before, which have left."""
        for kept in inputs.kept:
            if kept.version is not None and kept.local is not None and kept.local._version != kept.version:
                raise NotBuiltError(
                    "a block changes its input in place, so its backward cannot compute with that input again",
                    hint="set activations.policy = 'none' and activations.offload = 'none'",
                )
        for _ in range(self._num_older):
            gone = self._leaving.popleft()
            self._await(gone)
            gone.local = None

    def keep(self, tensor: Tensor) -> KeptInput:
        """`tensor` until the backward. The same tensor, given twice or to several blocks, is kept once."""
        storage, form = tensor.untyped_storage(), InputForm.of(tensor)
        key = (id(storage), tensor._version, tensor.storage_offset(), form)
        if key in self._seen:
            source, known = self._seen[key]
            found = known() if source() is storage else None
            if found is not None:
                return found
        kept = KeptInput(form, self)
        with torch.no_grad():
            self._take_in(kept, tensor.detach())
        self._seen[key] = (weakref.ref(storage), weakref.ref(kept))
        self._alive.add(kept)
        self.num_kept += 1
        return kept

    def _take_in(self, kept: KeptInput, tensor: Tensor) -> None:
        is_copy = not kept.form.is_dense
        flat = tensor.contiguous().view(-1) if is_copy else _flat(tensor)
        kept.local = self._partition.own_share(flat) if self._partition is not None else flat
        kept.version = None if is_copy or self._partition is not None else tensor._version
        if self._link is not None:
            kept.slot = self.slots.take(kept.local.nbytes)
            self._link.send(kept.local, kept.slot)
            kept.busy = kept.slot.done
            self._leaving.append(kept)

    def bring(self, kept: KeptInput) -> None:
        """Begin to copy an input back to the device."""
        if kept.local is not None or kept.slot is None or self._link is None:
            return
        form, partition = kept.form, self._partition
        length = form.numel if partition is None else partition.share_length(form.numel)
        with torch.no_grad():
            kept.local = torch.empty(length, dtype=form.dtype, device=form.device)
            self._link.bring(kept.slot, kept.local)
        kept.busy = kept.slot.done

    def fetch(self, kept: KeptInput) -> Tensor:
        """The input of a block that is recomputed now, as a new tensor object."""
        self.bring(kept)
        self.release(kept)
        if kept.local is None:
            raise RuntimeError("the input of a recomputed block was freed before its backward")
        form, flat = kept.form, kept.local
        with torch.no_grad():
            if self._partition is not None:
                flat = self._partition.gathered(flat, form.numel)
            return form.restored(flat).detach().requires_grad_(form.requires_grad)

    def release(self, kept: KeptInput) -> None:
        """Free the slot of an input that is back, never left, or is not wanted any more."""
        self._await(kept)
        if kept in self._leaving:
            self._leaving.remove(kept)
        if kept.slot is not None:
            self.slots.give(kept.slot)
            kept.slot = None

    def _await(self, kept: KeptInput) -> None:
        """The computation waits for the copy of `kept.local`."""
        if self._link is not None:
            self._link.wait(kept.busy)
        kept.busy = None


def _chosen(args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The ids of the inputs to keep: hidden states, and others that need a gradient, as an encoder's output.

    The first floating-point argument is the hidden states, also without a gradient (frozen embeddings). Masks and
    rotary tables belong to all blocks: they stay where they are, and so do expanded tensors.
    """
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())
    wanted = [value for index, value in enumerate(given) if index == 0 or value.requires_grad]
    return {id(value) for value in wanted if not InputForm.of(value).overlaps}


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
