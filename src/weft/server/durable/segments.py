"""The files of a log: numbered by their first record, and used again when a snapshot has made them needless.

Writing over pages that a file already has costs a fourth to a tenth of growing it, so a log pays for growth once: until
the first snapshot.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

SEGMENT_BYTES = 64 << 20
SPARES = 16  # files kept for use again: what a log comes to between two snapshots of its own accord
LEAST_FREE_BYTES = 256 << 20  # on a disk with less, a spare would take the room that snapshots need
_NAME = "log-{:020d}.wal"
_SPARE = "spare-{:02d}.wal"


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
        path.rename(folder / spare) if spare and _has_room(folder) else path.unlink()


def _has_room(folder: Path) -> bool:
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize >= LEAST_FREE_BYTES
