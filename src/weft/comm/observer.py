"""Counts the collectives that really go out, whoever issues them: fully_shard, DDP or weft itself.

A dispatch mode sees every c10d operator. It observes for a step or two; it is not meant to stay on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv_": "recv",
}


class CollectiveObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with CollectiveObserver() as seen:`, `seen.counts` and `seen.dtypes` fill by collective name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, rest = str(func.name()).partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            name = _NAMES.get(rest.partition(".")[0])
            if name is not None:
                self._record(name, args)
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Any) -> None:
        tensors = _tensors(args)
        # The tiny reductions of counts, losses and norms are bookkeeping, not traffic of the layout.
        if max((tensor.numel() for tensor in tensors), default=0) <= SMALL_ELEMENTS:
            name = f"small_{name}"
        self.counts[name] += 1
        self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)


SMALL_ELEMENTS = 8


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
