"""Counts the collectives that are really issued, by fully_shard, DDP or weft itself.

A dispatch mode sees every c10d operator. It is meant for a step or two, not to stay on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.comm.watch import OperatorWatch

# c10d's operators by the collective's common name. Functional ones (DTensor's) have their own namespace.
_NAMES = {
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "scatter_": "scatter",
    "gather_": "gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "all_reduce_by": "all_reduce",  # our own, before the messages of an algorithm
}


_carries_buffers = ContextVar("carries_buffers", default=False)


@contextmanager
def buffer_collectives() -> Iterator[None]:
    """Collectives inside carry buffers and statistics. They count under separate names: they are not traffic of the
    layout, and their dtypes are not those of gradients."""
    token = _carries_buffers.set(True)
    try:
        yield
    finally:
        _carries_buffers.reset(token)


def carries_buffers() -> bool:
    return _carries_buffers.get()


_component: ContextVar[tuple[str, str] | None] = ContextVar("component", default=None)


@contextmanager
def wire_format(component: str, name: str) -> Iterator[None]:
    """Collectives inside carry a component of the table of formats in this format; Gloo has bytes for float8."""
    token = _component.set((component, name))
    try:
        yield
    finally:
        _component.reset(token)


class CollectiveObserver(OperatorWatch):  # type: ignore[no-untyped-call]
    """Inside `with CollectiveObserver() as seen:`, `seen.counts` and `seen.dtypes` fill by collective name."""

    def __init__(self, *, no_dtypes_of: Collection[str] = ()) -> None:
        """`no_dtypes_of`: names of groups that send activations, whose dtypes are not those of gradients."""
        super().__init__(self)
        self._no_dtypes_of = frozenset(no_dtypes_of)
        self.counts: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        self.formats: dict[str, set[str]] = {}  # by component, of collectives inside `wire_format`
        self.is_paused = False

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = collective_name(func)
        if name is not None and not self.is_paused:
            self._record(name, args)

    def _record(self, name: str, args: Any) -> None:
        tensors = tensors_of(args)
        # Small reductions of counts, losses and norms are not traffic of the layout.
        if max((tensor.numel() for tensor in tensors), default=0) <= SMALL_ELEMENTS:
            name = f"small_{name}"
        elif carries_buffers():
            name = f"{BUFFERS}_{name}"
        self.counts[name] += 1
        if (carried := _component.get()) is not None:
            found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
            self.formats.setdefault(carried[0], set()).update(carried[1] if one == "uint8" else one for one in found)
            return
        group = group_of(args) if self._no_dtypes_of else None
        if group is not None and str(group.group_name) in self._no_dtypes_of:
            return
        self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)


SMALL_ELEMENTS = 8
BUFFERS = "buffer"  # prefix of the names inside `buffer_collectives`


def collective_name(func: Any) -> str | None:
    """The common name of this operator; None if it is no collective."""
    namespace, _, rest = str(func.name()).partition("::")
    return _NAMES.get(rest.partition(".")[0]) if namespace in ("c10d", "_c10d_functional", "weft") else None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an operator's arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def group_of(args: Any) -> dist.ProcessGroup | None:
    """The process group among an operator's arguments, where c10d passes it boxed."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # the reduce operation is boxed too
    return None


def named_group(name: str) -> dist.ProcessGroup:
    found: dist.ProcessGroup = getattr(distributed_c10d, "_resolve_process_group")(name)  # noqa: B009  # no public form
    return found
