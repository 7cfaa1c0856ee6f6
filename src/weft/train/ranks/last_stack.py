"""The Python stack of a process that cannot answer: written to a file by C code that needs no interpreter lock.

    a thread of faulthandler   after `delay_s` without `postpone`: code that keeps the interpreter lock (a regular
                               expression, a C extension) keeps all other Python threads from calling it
    a fatal signal             faulthandler's handler writes the stacks; before an abort ends the process it is held for
                               six seconds, so that the watch's thread can ask the other ranks for the reason

A stopped process (SIGSTOP) writes nothing: its state says what it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import tempfile
from pathlib import Path

from weft.train.ranks.progress import call_text

_CALL = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
_ABORT_LINE = "Fatal Python error: Aborted"
_FRAMES = 6
_MAX_BYTES = 200_000


class LastStack:
    """One per process; the file is removed at the end."""

    def __init__(self, folder: Path | None, *, rank: int) -> None:
        if folder is None:
            number, name = tempfile.mkstemp(prefix=f"weft-stack-{rank}-")
            os.close(number)
            self.path = Path(name)
        else:
            self.path = stack_path(folder, rank=rank)
        self._file = self.path.open("a")  # so that what follows a truncation starts at 0

    def start(self) -> None:
        """From now on fatal signals write here. Handlers are inherited by no program that this process starts."""
        _hold_aborts()
        faulthandler.enable(self._file, all_threads=True)

    def postpone(self, delay_s: float) -> None:
        """Write the stacks in `delay_s` seconds, unless this is called again before."""
        if os.fstat(self._file.fileno()).st_size:  # of a lock that was released after all, or of a stop
            self._clear()
        faulthandler.dump_traceback_later(delay_s, file=self._file)

    def is_aborting(self) -> bool:
        """Whether the process is held in an abort."""
        return _ABORT_LINE in _text(self.path)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
        _default_aborts()
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _clear(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if not self.is_aborting():
            os.ftruncate(self._file.fileno(), 0)


def stack_path(folder: Path, *, rank: int) -> Path:
    return folder / f"stack-{rank}"


def read_stack(path: str) -> list[str]:
    """The main thread's stack, innermost first ("model.py:12 in forward"); [] if none was written."""
    calls: list[str] = []
    for line in _text(Path(path)).splitlines() if path else ():
        if "(most recent call first)" in line:
            calls = []  # the main thread is the last
        elif (call := _CALL.match(line)) is not None and len(calls) < _FRAMES:
            calls.append(call_text(call["file"], call["line"], call["name"]))
    return calls


def _text(path: Path) -> str:
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_BYTES)
    return ""


def _hold_aborts() -> None:
    # libc's `sleep` is the handler: called with the signal's number, it holds the aborting thread for six seconds and
    # runs no code of ours in it. faulthandler, enabled afterwards, writes first and then calls it.
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        _set_handler(ctypes.cast(libc.sleep, ctypes.c_void_p))


def _default_aborts() -> None:
    if sys.platform == "linux":
        _set_handler(ctypes.c_void_p(0))  # SIG_DFL


def _set_handler(handler: ctypes.c_void_p) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), handler)
