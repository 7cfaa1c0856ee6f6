"""`compiled`: compiles every kernel: cached on disk, without the GIL, without allocation.

`_nrt=False` disables numba's reference counts: with them a lookup takes nine times as long, because every helper counts
the arrays that it takes. So a kernel allocates nothing: its caller passes the memory for intermediate results.
No fastmath except the reassociation of additions in `compiled_sum`, fixed at compilation: a kernel returns the same
bits in every run on one kind of processor.

Numba's cache compares the stamp of the kernel's own file, not those of the functions it calls: after an upgrade that
changes index.py alone, an old push would still run. So the stamp here is a digest of every file of this folder.
A cached kernel refers to its NamedTuples (Layout, Store, Scratch) by module: these stay in their files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., object])
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "_nrt": False}


MARK = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _cached(function: Function, options: dict[str, Any]) -> Function:
    kernel = njit(cache=True, **options)(function)
    file: Any = getattr(kernel._cache, "_cache_file", None)
    if not hasattr(file, "_source_stamp"):  # another numba keeps it elsewhere: rather slow starts than old code
        return cast(Function, njit(**options)(function))
    file._source_stamp = MARK
    return cast(Function, kernel)


def compiled(function: Function) -> Function:
    return _cached(function, OPTIONS)


def kernel_array(array: NDArray[Any], dtype: type) -> NDArray[Any]:
    """The form that kernels are compiled for: read-only or unaligned arrays would compile each kernel again.

    `np.require` alone takes ten times as long for an array that is in this form already.
    """
    is_ready = array.dtype == dtype and array.flags.carray
    return array if is_ready else np.require(array, dtype, ["C", "A", "W"])


def compiled_sum(function: Function) -> Function:
    """For a sum over one row: its additions may be reassociated for vector instructions."""
    return _cached(function, OPTIONS | {"fastmath": {"reassoc"}})
