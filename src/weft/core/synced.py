"""`sync_path`: the bytes of a file or the names of a folder are on disk when it returns."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Call before a rename, which may reach the disk earlier than the bytes, and after it, on the folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
