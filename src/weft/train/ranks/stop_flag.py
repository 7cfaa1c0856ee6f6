"""`StopFlag`: SIGINT and SIGTERM ask the training loop to stop; they do not interrupt it.

It saves nothing and communicates with no rank: the loop reads `requested`, agrees with the other ranks, saves, and
exits with 0. A launcher of several hosts sends SIGTERM to each of them, and a rank may have stopped with the others
before its own arrives; so a rank that has ended ignores SIGTERM: dying of it would report that nothing was saved.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from weft.train.ranks.environment import is_torchrun_rank


class StopFlag:
    """Context manager for the main thread; in other threads it never fires, since Python delivers signals to main."""

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        is_rank = is_torchrun_rank(os.environ)
        for number, handler in self._previous.items():
            is_late = is_rank and number == signal.SIGTERM and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if is_late else handler)
        self._previous.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C interrupts at once: otherwise a save that hangs could not be aborted from the keyboard.
        if self._requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._requested = True
