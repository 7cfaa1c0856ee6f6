"""Refuses folders for offloaded states that are not on a local disk, before any file is made there.

tmpfs is host memory, an overlay copies and has no direct transfers of its own, and a network file system is neither
fast nor coherent. Others must take a direct transfer (O_DIRECT).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from weft.core.errors import BadValueError
from weft.engine.offload.direct_file import PAGE_BYTES

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_OVERLAYS = ("overlay", "overlayfs", "aufs", "unionfs")
_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "virtiofs", "fuse")
_HINT = "set offload.folder to a folder of a local disk (ext4 or xfs)"


def require_local_disk(folder: Path, *, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Make `folder` and require that it is on a local disk that takes direct transfers."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadValueError(f"offload.folder {folder} cannot be made ({error.strerror})", hint=_HINT) from None
    kind = file_system_of(folder, mounts=mounts)
    what = _why_not(kind)
    if what:
        raise BadValueError(f"offload.folder {folder} is on {what}, not on a local disk", hint=_HINT)
    why = _why_not_direct(folder)
    if why:
        raise BadValueError(f"offload.folder {folder} takes no direct transfers (O_DIRECT: {why})", hint=_HINT)


def file_system_of(folder: Path, *, mounts: Path) -> str:
    """The type of the file system that holds `folder`; "" if the system does not tell."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    resolved, best, kind = folder.resolve(), -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " ")) if len(before.split()) > 4 else None
        if point is not None and after and resolved.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def _why_not(kind: str) -> str:
    if kind in _IN_MEMORY:
        return f"{kind}, which is host memory"
    if kind in _OVERLAYS:
        return f"an overlay ({kind})"
    if kind.startswith(_NETWORK):
        return f"a network or user-space file system ({kind})"
    return ""


def _why_not_direct(folder: Path) -> str:
    path = folder / f".direct-{os.getpid()}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwritev(descriptor, [mmap.mmap(-1, PAGE_BYTES)], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror or type(error).__name__
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return ""
