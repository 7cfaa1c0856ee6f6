"""Progress of this rank: its current phase, the time it began, and the stack of its main thread.

`phase` of `weft.train.ranks.failures` sets it, with two assignments per phase; `watch` publishes it.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback

_STACK_FRAMES = 4
_P2P = "/weft/engine/pp/p2p.py"


class RankProgress:
    """The phases of the main thread, innermost last. Other threads (a background save) are ignored."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._shown = ("start", time.time())

    @property
    def phase(self) -> str:
        return self._shown[0]

    @property
    def since(self) -> float:
        """When the phase was entered, or the last one left."""
        return self._shown[1]

    def enter(self, name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self._names.append(name)
            self._shown = (name, time.time())

    def leave(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._names:
            left = self._names.pop()
            self._shown = (self._names[-1] if self._names else f"after {left}", time.time())


progress = RankProgress()  # one per process, which has one main thread


def main_stack() -> list[str]:
    """Stack of the main thread, innermost first: "model.py:12 in forward"."""
    calls = _main_calls()[-_STACK_FRAMES:]
    return [f"{call.filename.rpartition('/')[2]}:{call.lineno} in {call.name}" for call in reversed(calls)]


def is_main_waiting() -> bool:
    """Whether the main thread is in torch.distributed or waits for a p2p message between pipeline stages."""
    return any(_waits(call.filename) for call in _main_calls()[-_STACK_FRAMES:])


def is_message_wait(error: BaseException) -> bool:
    """Whether the exception was raised while waiting for a p2p message between pipeline stages."""
    return any(call.filename.endswith(_P2P) for call in traceback.extract_tb(error.__traceback__))


def _waits(filename: str) -> bool:
    return "/torch/distributed/" in filename or filename.endswith(_P2P)


def _main_calls() -> traceback.StackSummary:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
