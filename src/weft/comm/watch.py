"""Passes every operator that runs to listeners: one dispatch mode, any number of listeners. It changes nothing.

One mode in all, not one per listener, because each mode sends every operator through Python once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Listener(Protocol):
    def saw(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operator has run, on plain tensors: a DTensor's operator appears as that of its local tensors."""


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with OperatorWatch(listener, ...):`.

    With `on_error`, the error of a listener goes there and the listener is dropped; without it, the operator raises
    that error. `on_failure` is called when an operator itself fails, before anything is freed.
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
        """Compiled code runs unobserved; without this it would not be compiled at all while the mode is on."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # else listeners would see it twice, once with global shapes
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            if self._on_failure is not None:
                self._on_failure()
            raise
        for listener in self._listeners:
            self._notify(listener, func, args, kwargs or {}, result)
        return result

    def _notify(self, listener: Listener, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        try:
            listener.saw(func, args, kwargs, result)
        except Exception as error:  # of any kind: a listener must not fail the step
            if self._on_error is None:
                raise
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self._on_error(error)
