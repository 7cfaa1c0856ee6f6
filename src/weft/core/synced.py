"""`write_all`: complete vectored writes. `sync_path`: fsync of a file or a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def write_all(parts: Iterable[Any], write: Callable[[list[memoryview], int], int]) -> None:
    """Write all buffers, in order, without copying. `write(left, done)` writes some bytes and returns how many."""
    left = [view for view in (memoryview(part).cast("B") for part in parts if len(part)) if view.nbytes]
    done = 0
    while left:
        count = write(left, done)
        done += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]


def sync_path(path: Path) -> None:
    """Flush to disk: the file before its rename, which may reach the disk first, and the folder after it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
