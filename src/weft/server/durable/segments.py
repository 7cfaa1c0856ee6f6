"""The files of a log: numbered by their first record, pre-written, used again when a snapshot has made them needless.

Writing over pages that a file already has costs a fourth to a ninth of growing it.
"""

from __future__ import annotations

import os
import threading
from itertools import pairwise
from pathlib import Path

SEGMENT_BYTES = 64 << 20
SPARES = 2  # files kept for use again
_NAME = "log-{:020d}.wal"
_SPARE = "spare-{:02d}.wal"
_ZEROS = bytes(1 << 20)


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(first record, path), oldest first."""
    found = ((int(path.stem.removeprefix("log-")), path) for path in folder.glob("log-*.wal"))
    return sorted(found)


def open_segment(folder: Path, first: int) -> int:
    """A file descriptor for a new segment: a spare one under its new name where there is one."""
    target = folder / _NAME.format(first)
    for number in range(SPARES):
        try:
            (folder / _SPARE.format(number)).rename(target)
            return os.open(target, os.O_RDWR)
        except FileNotFoundError:
            continue
    return os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)


def retire(folder: Path, *, before: int) -> None:
    """Drop segments that hold only records below `before`; up to SPARES become spares."""
    every = segments(folder)
    for (_, path), (following, _) in pairwise(every):
        if following > before:
            return
        spare = next((s for s in map(_SPARE.format, range(SPARES)) if not (folder / s).exists()), None)
        path.rename(folder / spare) if spare else path.unlink()


class Spares:
    """Keeps a pre-written file ready, made by a thread of its own."""

    def __init__(self, folder: Path, *, segment_bytes: int) -> None:
        self._folder, self._bytes = folder, segment_bytes
        self._thread: threading.Thread | None = None

    def provide(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, daemon=True)
            self._thread.start()

    def _write(self) -> None:
        target = self._folder / _SPARE.format(0)
        if target.exists():
            return
        draft = target.with_suffix(".tmp")
        try:
            with draft.open("wb", buffering=0) as file:
                for _ in range(self._bytes // len(_ZEROS)):
                    file.write(_ZEROS)
            draft.rename(target)
        except OSError:  # a full disk: the log itself will say so
            draft.unlink(missing_ok=True)
