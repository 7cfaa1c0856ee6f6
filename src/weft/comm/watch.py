"""Sees every operator that runs, once: one dispatch mode, any number of listeners. It changes nothing.

One mode and not one a listener, because each mode sends every operator through Python once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Listener(Protocol):
    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operator has run, on plain tensors: a DTensor's comes by as that of its local tensors."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with OperatorWatch(listener, ...):`.

    With `on_error`, a listener that raises is told of there and not asked again; without it, its error is the
    operator's. `on_failure` is called when an operator itself fails, while everything is as it was then.
    """

    def __init__(
        self,
        *listeners: Listener,
        on_error: Callable[[Exception], None] | None = None,
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listeners = listeners
        self._on_error, self._on_failure = on_error, on_failure

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as it is, unseen; without this it would not be compiled at all while someone watches."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # else it would be seen twice, once with global shapes
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            if self._on_failure is not None:
                self._on_failure()
            raise
        for listener in self._listeners:
            self._tell(listener, func, args, kwargs or {}, result)
        return result

    def _tell(self, listener: Listener, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            listener.saw(func, args, kwargs, result)
        except Exception as error:  # of any kind: it is not the step's
            if self._on_error is None:
                raise
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self._on_error(error)
