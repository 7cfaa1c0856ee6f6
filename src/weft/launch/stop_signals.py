"""Counts the signals that ask the launcher to stop; the agent acts on the count, never the handler.

first signal: the ranks are asked (SIGTERM) and waited for;  second: they are killed
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Protocol

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_ELASTIC_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


class StopCount(Protocol):
    """Requests to stop so far."""

    @property
    def count(self) -> int: ...


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP only count. Without effect outside the main thread."""

    def __init__(self) -> None:
        self.count = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._elastic_choice: str | None = None

    def __enter__(self) -> StopSignals:
        # Elastic would replace these handlers by its own: SIGTERM to the ranks, SIGKILL 30 s later, saved or not.
        self._elastic_choice = os.environ.get(_ELASTIC_VARIABLE)
        os.environ[_ELASTIC_VARIABLE] = ""
        if threading.current_thread() is threading.main_thread():
            self._take_over()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.environ.pop(_ELASTIC_VARIABLE)
        if self._elastic_choice is not None:
            os.environ[_ELASTIC_VARIABLE] = self._elastic_choice

    def _take_over(self) -> None:
        numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
        for number in numbers:
            # An ignored signal stays ignored: that is how nohup keeps a job alive.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
