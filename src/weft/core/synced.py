"""`sync_path`: a file's bytes, or a folder's names, survive the machine once this returns."""

from __future__ import annotations

import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Before a rename: it may reach the disk earlier than the bytes do. After one: or a power cut may lose it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
