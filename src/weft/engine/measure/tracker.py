"""Every live byte of one device, as the operators make and drop it: storages are followed, fake or real.

live = sum over storages of their size, rounded as the caching allocator rounds (512 B). A storage counts from the
operator that returns it until Python drops it; a storage that is resized counts with its new size. What a kernel takes
and gives back inside one operator never shows: `workspace` says how much that is, where it is known.
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

ROUNDING_BYTES = 512
BEFORE = "before the step"


@dataclass(slots=True)
class Live:
    """A storage that exists: its size, and where it came from."""

    nbytes: int
    phase: str
    module: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    reference: Any = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """An operator of a step, told from others of its name by their order: the same in every step that is alike."""

    phase: str = ""
    operator: str = ""
    order: int = 0


@dataclass(frozen=True, kw_only=True)
class Peak:
    """When most was alive."""

    nbytes: int = 0
    moment: Moment = Moment()
    workspace_bytes: int = 0  # taken by that operator itself


class MemoryTracker:
    """A listener of `OperatorWatch`. `peak` is the most that was alive; `look` sees all of it after `look_at`."""

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
        """`allocated(key, nbytes)` hears of every change: bytes taken under a key, 0 for given back.

        `is_in_backward` is asked where autograd is not at work: in a pipeline, between its nodes.
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
        """What the step is at. The backward is told by autograd, which runs it: `_current_graph_task_id` is private,
        nothing public says so from inside an operator, and tests/fake/dryrun fails when it moves."""
        is_backward = torch._C._current_graph_task_id() != -1 or self._is_in_backward()
        return "backward" if is_backward else self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name

    def begin_again(self, *, look_at: Moment | None) -> None:
        """Forget the peak so far, not what is alive."""
        self._look_at = look_at
        gc.collect()
        self.peak = Peak()
        self._order.clear()

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing is alive but these, which were there before."""
        self.live.clear()
        self.current_bytes = 0
        for tensor in tensors:
            self._hold(tensor)

    def _hold(self, tensor: torch.Tensor) -> None:
        for part in parts_of(tensor):
            self._add(part, BEFORE, "", "")

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around the `OperatorWatch` that this listens to: also follows storages that are resized."""
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
                entry.reference = None  # a storage that dies later is no longer this tracker's business

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func.namespace == "prim" or active_fake_mode() is not self._mode:
            return  # questions, and shape arithmetic of others
        name, phase = _name(func), self.phase
        self._order[phase, name] += 1
        for leaf in result if isinstance(result, tuple | list) else (result,):
            if isinstance(leaf, torch.Tensor):
                for part in parts_of(leaf):
                    self._add(part, phase, None, name)
            elif isinstance(leaf, tuple | list):
                for tensor in tree_leaves(leaf):
                    if isinstance(tensor, torch.Tensor):
                        self._add(tensor, phase, None, name)
        self._mark(Moment(phase=phase, operator=name, order=self._order[phase, name]), func, args)

    def _add(self, tensor: torch.Tensor, phase: str, module: str | None, operator: str) -> None:
        # a fake tensor's `device` runs an operator of its own, twice as many as the step has
        if (getattr(tensor, "fake_device", None) or tensor.device).type != self._device_type:
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
        self._tell(key, entry.nbytes)

    def _changed(self, storage: torch.UntypedStorage) -> None:
        entry = self.live.get(storage._cdata)
        nbytes = rounded(storage.nbytes())
        if entry is not None and nbytes != entry.nbytes:
            self.current_bytes += nbytes - entry.nbytes
            entry.nbytes = nbytes
            self._tell(storage._cdata, 0)
            self._tell(storage._cdata, nbytes)

    def _drop(self, key: int) -> None:
        entry = self.live.pop(key, None)
        if entry is not None:
            self.current_bytes -= entry.nbytes
            self._tell(key, 0)

    def _tell(self, key: int, nbytes: int) -> None:
        if self._allocated is not None:
            self._allocated(key, nbytes)

    def _mark(self, moment: Moment, func: Any, args: Any) -> None:
        extra = self._workspace(func, args) if self._workspace is not None else 0
        if extra:
            self._tell(-1, extra)
            self._tell(-1, 0)
        if self.current_bytes + extra > self.peak.nbytes:
            self.peak = Peak(nbytes=self.current_bytes + extra, moment=moment, workspace_bytes=extra)
        if moment == self._look_at and self._look is not None:
            self._look(self.live)


def _name(func: Any) -> str:
    """aten.mm, c10d.allgather_; the overload tells a reader nothing."""
    return str(func).rpartition(".")[0]


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that hold a tensor's bytes: of its parts where it is a wrapper."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        parts = [getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0]]
        return [plain for part in parts if isinstance(part, torch.Tensor) for plain in parts_of(part)]
    return [tensor]


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUNDING_BYTES) * ROUNDING_BYTES
