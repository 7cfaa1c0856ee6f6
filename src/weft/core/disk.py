"""The error of a full disk: the folder, its free space, the space needed. `drafted`: a file is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from weft.core.errors import DiskFullError
from weft.core.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
HINT = "make room there, then go on with --resume; what was committed is untouched"


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk, or the user's share of it, is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def no_space(path: Path, *, needed_bytes: int | None = None, own_bytes: int = 0) -> str:
    """The sentence. `own_bytes`: of a failed write that will be removed, so that they count as free."""
    try:
        free = f", {format_bytes(shutil.disk_usage(_existing(path)).free + own_bytes)} free"
    except OSError:
        free = ""
    needed = f", {format_bytes(needed_bytes)} needed" if needed_bytes is not None else ""
    return f"No space left on device: {path}{needed}{free}"


def disk_full(error: OSError, path: Path | None = None) -> DiskFullError:
    """The error of a full disk; `path` where the system did not say it, as it never does of a write."""
    where = path if path is not None else Path(str(error.filename or "."))
    return DiskFullError(no_space(where), hint=HINT)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file: a full disk becomes its sentence, everything else stays."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(error, path) from error


@contextlib.contextmanager
def drafted(draft: Path, path: Path) -> Iterator[None]:
    """Around the writing of `draft`: renamed to `path` when complete, removed on any failure."""
    try:
        yield
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
