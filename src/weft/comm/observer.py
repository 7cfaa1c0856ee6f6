"""Counts the collectives that really go out, whoever issues them: fully_shard, DDP or weft itself.

A dispatch mode sees every c10d operator. It observes for a step or two; it is not meant to stay on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.watch import OperatorWatch

# The names c10d gives its operators, as one name a person knows. Functional ones (DTensor's) have their own namespace.
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
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
}


_is_of_buffers = ContextVar("is_of_buffers", default=False)


@contextmanager
def of_buffers() -> Iterator[None]:
    """Collectives inside carry buffers and their statistics: counted by names of their own, since they are not traffic
    of the layout and their formats are not those of gradients."""
    token = _is_of_buffers.set(True)
    try:
        yield
    finally:
        _is_of_buffers.reset(token)


class CollectiveObserver(OperatorWatch):  # type: ignore[no-untyped-call]
    """Inside `with CollectiveObserver() as seen:`, `seen.counts` and `seen.dtypes` fill by collective name."""

    def __init__(self, *, no_dtypes_of: Collection[str] = ()) -> None:
        """`no_dtypes_of`: names of groups that send activations, whose formats are not those of gradients."""
        super().__init__(self)
        self._no_dtypes_of = frozenset(no_dtypes_of)
        self.counts: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = collective_name(func)
        if name is not None:
            self._record(name, args)

    def _record(self, name: str, args: Any) -> None:
        tensors = tensors_of(args)
        # The tiny reductions of counts, losses and norms are bookkeeping, not traffic of the layout.
        if max((tensor.numel() for tensor in tensors), default=0) <= SMALL_ELEMENTS:
            name = f"small_{name}"
        elif _is_of_buffers.get():
            name = f"{BUFFERS}_{name}"
        self.counts[name] += 1
        group = group_of(args) if self._no_dtypes_of else None
        if group is not None and str(group.group_name) in self._no_dtypes_of:
            return
        self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)


SMALL_ELEMENTS = 8
BUFFERS = "buffer"  # before the names of what is sent inside `of_buffers`


def collective_name(func: Any) -> str | None:
    """What people call this operator, if it is a collective."""
    namespace, _, rest = str(func.name()).partition("::")
    return _NAMES.get(rest.partition(".")[0]) if namespace in ("c10d", "_c10d_functional") else None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an operator's arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def group_of(args: Any) -> dist.ProcessGroup | None:
    """The process group among an operator's arguments: c10d hands it over boxed."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue  # the reduce operation is boxed too
    return None
