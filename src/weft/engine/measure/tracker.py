"""Tracks every live byte of one device by its storages, fake or real, as operators allocate them and Python frees them.

live = sum over storages of their size, rounded as the caching allocator rounds (512 B). A storage counts from the
operator that returns it until Python drops it; a resized storage counts with its new size. Memory that a kernel
allocates and frees inside one operator is invisible: `workspace` returns its size, if known.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from weft.engine.offload.slab import is_host_memory

ROUNDING_BYTES = 512
BEFORE = "before the step"


@dataclass(slots=True)
class Live:
    """A live storage: its size and its origin."""

    nbytes: int
    phase: str
    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reference: Any = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An operator of a step, numbered among those of its name and phase: the same in every like step."""

    phase: str = ""
    operator: str = ""
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment of most live bytes."""

    nbytes: int = 0
    moment: Moment = Moment()
    workspace_bytes: int = 0  # allocated by that operator itself


class MemoryTracker:
    """A listener of `OperatorWatch`. `peak`: the maximum of live bytes; `look` gets all live storages at `look_at`."""

    def __init__(
        self,
        *,
        device_type: str,
        look_at: Moment | None = None,
        look: Callable[[dict[int, Live]], None] | None = None,
        module: Callable[[], str] = str,
        workspace: Callable[[Any, Any], int] | None = None,
        allocated: Callable[[int, int], None] | None = None,
        is_in_backward: Callable[[], bool] = bool,
    ) -> None:
        """`allocated(key, nbytes)` is called at every change: bytes allocated under a key, 0 when freed.

        `is_in_backward` is called outside of autograd's backward: in a pipeline, between its nodes.
        """
        self.live: dict[int, Live] = {}
        self.current_bytes = 0
        self.peak = Peak()
        self._phase = BEFORE
        self._order: Counter[tuple[str, str]] = Counter()
        self._device_type = device_type
        self._look_at, self._look, self._module = look_at, look, module
        self._workspace, self._allocated = workspace, allocated
        self._is_in_backward = is_in_backward
        self._mode: Any = None

    @property
    def phase(self) -> str:
        """The phase of the step. Autograd's `_current_graph_task_id` shows a running backward: it is private, torch has
        no public form inside an operator, and tests/fake/dryrun fails when it moves."""
        is_backward = torch._C._current_graph_task_id() != -1 or self._is_in_backward()
        return "backward" if is_backward else self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name

    def reset(self, *, look_at: Moment | None) -> None:
        """Reset the peak, not the live storages."""
        self._look_at = look_at
        gc.collect()
        self.peak = Peak()
        self._order.clear()

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin with these tensors alone as live."""
        self.live.clear()
        self.current_bytes = 0
        for tensor in tensors:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        for part in plain_tensors(tensor):
            self._add(part, BEFORE, "", "")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around the `OperatorWatch` of this listener: also tracks resized storages."""
        self._mode = active_fake_mode()
        original = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._changed(storage)
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
            for entry in self.live.values():
                entry.reference = None  # storages freed later do not count any more

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace == "prim" or active_fake_mode() is not self._mode:
            return  # queries, and shape arithmetic of other fake modes
        name, phase = _name(func), self.phase
        self._order[phase, name] += 1
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, torch.Tensor):
                for part in plain_tensors(leaf):
                    self._add(part, phase, None, name)
            elif isinstance(leaf, tuple | list):
                for tensor in tree_leaves(leaf):
                    if isinstance(tensor, torch.Tensor):
                        self._add(tensor, phase, None, name)
        self._mark(Moment(phase=phase, operator=name, order=self._order[phase, name]), func, args)

    def _add(self, tensor: torch.Tensor, phase: str, module: str | None, operator: str) -> None:
        # `device` of a fake tensor runs an operator itself: twice as many operators as the step has
        if (getattr(tensor, "fake_device", None) or tensor.device).type != self._device_type:
            return
        if is_host_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.live:
            self._changed(storage)
            return
        entry = Live(
            nbytes=rounded(storage.nbytes()),
            phase=phase,
            module=self._module() if module is None else module,
            operator=operator,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
        )
        entry.reference = weakref.ref(storage, lambda _: self._drop(key))
        self.live[key] = entry
        self.current_bytes += entry.nbytes
        self._report(key, entry.nbytes)

    def _changed(self, storage: torch.UntypedStorage) -> None:
        entry = self.live.get(storage._cdata)
        nbytes = rounded(storage.nbytes())
        if entry is not None and nbytes != entry.nbytes:
            self.current_bytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
            self._report(storage._cdata, 0)
            self._report(storage._cdata, nbytes)

    def _drop(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.current_bytes -= entry.nbytes
            self._report(key, 0)

    def _report(self, key: int, nbytes: int) -> None:
        if self._allocated is not None:
            self._allocated(key, nbytes)

    def _mark(self, moment: Moment, func: Any, args: Any) -> None:
        extra = self._workspace(func, args) if self._workspace is not None else 0
        if extra:
            self._report(-1, extra)
            self._report(-1, 0)
        if self.current_bytes + extra > self.peak.nbytes:
            self.peak = Peak(nbytes=self.current_bytes + extra, moment=moment, workspace_bytes=extra)
        if moment == self._look_at and self._look is not None:
            self._look(self.live)


def _name(func: Any) -> str:
    """aten.mm, c10d.allgather_; without the overload."""
    return str(func).rpartition(".")[0]


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes: the inner tensors of a wrapper subclass."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        parts = [getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0]]
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in plain_tensors(part)]
    return [tensor]


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
