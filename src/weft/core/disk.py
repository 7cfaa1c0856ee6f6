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
HINT = "free some space there, then continue with --resume; committed files are unchanged"


def is_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def no_space(path: Path, *, needed_bytes: int | None = None, own_bytes: int = 0) -> str:
    """The sentence of the error. `own_bytes`: bytes of the failed write, which will be removed and count as free."""
    try:
        free = f", {format_bytes(shutil.disk_usage(_existing(path)).free + own_bytes)} free"
    except OSError:
        free = ""
    needed = f", {format_bytes(needed_bytes)} needed" if needed_bytes is not None else ""
    return f"No space left on device: {path}{needed}{free}"


def disk_full(error: OSError, path: Path | None = None) -> DiskFullError:
    """The error of a full disk; `path` if the system does not name it, as for any write."""
    where = path if path is not None else Path(str(error.filename or "."))
    return DiskFullError(no_space(where), hint=HINT)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Wrap the writing of a file: a full disk raises `DiskFullError`, other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise disk_full(error, path) from error


@contextlib.contextmanager
def drafted(draft: Path, path: Path) -> Iterator[None]:
    """Wrap the writing of `draft`: rename it to `path` when complete, remove it on any failure."""
    try:
        yield
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _existing(path: Path) -> Path:
    return next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
