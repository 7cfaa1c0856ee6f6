"""The folder of benchmarks on sys.path, for a while: left there, it would hide test modules of the same names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


@contextmanager
def benchmarks_importable() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
