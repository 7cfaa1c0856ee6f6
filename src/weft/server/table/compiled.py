"""`compiled`: the one way in which kernels are compiled: cached on disk, without the GIL, without allocation.

`_nrt=False` leaves out numba's reference counts: with them a lookup takes nine times as long, because every helper that
is given an array counts it. So a kernel allocates nothing: its caller gives it room for what it needs on the way.
No fastmath but the grouping of additions in `compiled_sum`, fixed when it is compiled: a kernel gives the same bits in
every run on one kind of processor.

Numba's cache asks whether the kernel's own file has changed, not those of the functions it calls: after an upgrade that
changes index.py alone, an old push would run on. So the mark that it compares is made of every file of this folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., object])
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


def _mark_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


MARK = _mark_of_sources()


def _cached(function: Function, options: dict[str, Any]) -> Function:
    kernel = njit(cache=True, **options)(function)
    file: Any = getattr(kernel._cache, "_cache_file", None)
    if not hasattr(file, "_source_stamp"):  # a numba that keeps it elsewhere: slow starts rather than old code
        return cast(Function, njit(**options)(function))
    file._source_stamp = MARK
    return cast(Function, kernel)


def compiled(function: Function) -> Function:
    return _cached(function, OPTIONS)


def compiled_sum(function: Function) -> Function:
    """For a sum of one row: its additions may be grouped for the processor's vectors."""
    return _cached(function, OPTIONS | {"fastmath": {"reassoc"}})
