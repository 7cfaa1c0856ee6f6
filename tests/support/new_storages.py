"""What operators allocate beside tensors that are known: the temporaries of an update."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes alive at once in storages that operators made, beside those that are known."""

    def __init__(self, *, known: Sequence[torch.Tensor | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known if tensor is not None}
        self._new: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._new[leaf.untyped_storage()._cdata] = weakref.ref(leaf.untyped_storage())
        alive = [storage for storage in (reference() for reference in self._new.values()) if storage is not None]
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in alive))
        return result
