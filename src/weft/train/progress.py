"""What this rank is doing now: the phase it is in, since when, and where its main thread stands.

`phase` of `weft.train.failures` writes it, two assignments a phase; the rank's watch publishes it (`rank_watch`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback

_STACK_FRAMES = 4
_MAIL = "/weft/engine/pp/p2p.py"


class RankProgress:
    """The phases of the main thread, innermost last. Phases of other threads (a save in the background) are not its."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._shown = ("start", time.time())

    @property
    def phase(self) -> str:
        return self._shown[0]

    @property
    def since(self) -> float:
        """When the phase was entered, or left where none is."""
        return self._shown[1]

    def enter(self, name: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self._names.append(name)
            self._shown = (name, time.time())

    def leave(self) -> None:
        if threading.current_thread() is threading.main_thread() and self._names:
            left = self._names.pop()
            self._shown = (self._names[-1] if self._names else f"after {left}", time.time())


progress = RankProgress()  # one a process, as there is one main thread


def main_stack() -> list[str]:
    """Where the main thread stands, innermost first: "model.py:12 in forward"."""
    calls = _main_calls()[-_STACK_FRAMES:]
    return [f"{call.filename.rpartition('/')[2]}:{call.lineno} in {call.name}" for call in reversed(calls)]


def is_main_waiting() -> bool:
    """Whether the main thread is somewhere in torch.distributed, or waits for a message between pipeline stages."""
    return any(_waits(call.filename) for call in _main_calls()[-_STACK_FRAMES:])


def is_message_wait(error: BaseException) -> bool:
    """Whether the exception was raised while a message between pipeline stages was awaited."""
    return any(call.filename.endswith(_MAIL) for call in traceback.extract_tb(error.__traceback__))


def _waits(filename: str) -> bool:
    return "/torch/distributed/" in filename or filename.endswith(_MAIL)


def _main_calls() -> traceback.StackSummary:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.StackSummary() if frame is None else traceback.extract_stack(frame)
