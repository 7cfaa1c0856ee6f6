"""Progress of this rank: its current phase, the time it began, and the stack of its main thread.

`phase` of `weft.train.ranks.failures` sets it, with two assignments per phase; `watch` publishes it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback

_STACK_FRAMES = 6


class RankProgress:
    """The phases of the main thread, innermost last. Other threads (a background save) are ignored."""

    def __init__(self) -> None:
        self._names: list[tuple[str, bool]] = []
        self._shown = ("start", time.time(), True)

    @property
    def phase(self) -> str:
        return self._shown[0]

    @property
    def since(self) -> float:
        """When the phase was entered, or the last one left."""
        return self._shown[1]

    @property
    def is_slow(self) -> bool:
        """Whether the phase may take longer on one rank than on others, so that a wait for it is no hang."""
        return self._shown[2]

    def enter(self, name: str, *, is_slow: bool = False) -> None:
        if threading.current_thread() is threading.main_thread():
            self._names.append((name, is_slow))
            self._shown = (name, time.time(), is_slow)

    def leave(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._names:
            left, is_slow = self._names.pop()
            name, is_slow = self._names[-1] if self._names else (f"after {left}", is_slow)
            self._shown = (name, time.time(), is_slow)


progress = RankProgress()  # one per process, which has one main thread


def main_stack() -> list[str]:
    """Stack of the main thread, innermost first: "model.py:12 in forward"."""
    calls = main_calls()[-_STACK_FRAMES:]
    return [call_text(call.filename, call.lineno or 0, call.name) for call in reversed(calls)]


def call_text(path: str, line: int | str, name: str) -> str:
    """ "model.py:12 in forward"; files of torch with their folders, which say where it waits."""
    _, torch, inside = path.rpartition("/site-packages/torch/")
    return f"{'torch/' + inside if torch else path.rpartition('/')[2]}:{line} in {name}"


def main_calls() -> traceback.StackSummary:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
