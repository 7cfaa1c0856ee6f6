"""Verification of a committed checkpoint: sizes of all files, digests of a share of them, never the tensors.

    good  <=>  manifest digest, step, sizes and digests all agree; every listed file is a regular file

Files that the manifest does not list are ignored: nothing opens them, and network file systems create such files
in directories, so rejecting them would lose a good checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.layout import step_path
from weft.checkpoint.manifest import FileRecord, Manifest, ManifestError, read_manifest

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class CheckpointVerdict:
    """The result of one reader. `reason` is empty for a good checkpoint."""

    manifest: Manifest | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class DigestShare:
    """The files whose digests one rank checks: those with `position % world_size == rank`."""

    rank: int = 0
    world_size: int = 1

    def holds(self, position: int) -> bool:
        return position % self.world_size == self.rank


NOTHING = DigestShare(rank=-1)  # sizes only
EVERYTHING = DigestShare()


def check_checkpoint(
    root: Path, step: int, *, share: DigestShare = EVERYTHING, from_disk: bool = False
) -> CheckpointVerdict:
    """Verify the checkpoint of a step; `from_disk` drops the page cache of its files first."""
    directory = step_path(root, step)
    try:
        manifest = _require_directory(directory, step)
        for position, (name, record) in enumerate(sorted(manifest.files.items())):
            _require_size(directory / name, record)
            if share.holds(position):
                _require_digest(directory / name, record, from_disk=from_disk)
    except ManifestError as error:
        return CheckpointVerdict(manifest=None, reason=str(error))
    except OSError as error:
        return CheckpointVerdict(manifest=None, reason=f"{Path(error.filename or directory).name}: {error.strerror}")
    return CheckpointVerdict(manifest=manifest, reason="")


def file_digest(path: Path, *, from_disk: bool = False) -> str:
    """SHA-256 of a file, block by block; a link is refused."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _require_directory(directory: Path, step: int) -> Manifest:
    if directory.is_symlink() or not directory.is_dir():
        raise ManifestError(f"{directory.name} is not a directory")
    manifest = read_manifest(directory)
    if manifest.step != step:
        raise ManifestError(f"{directory.name} has a manifest of step {manifest.step}")
    return manifest


def _require_size(path: Path, record: FileRecord) -> None:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"{path.name} is not a regular file")
    if status.st_size != record.size_bytes:
        raise ManifestError(f"{path.name} has {status.st_size} bytes instead of {record.size_bytes}")


def _require_digest(path: Path, record: FileRecord, *, from_disk: bool) -> None:
    if file_digest(path, from_disk=from_disk) != record.sha256:
        raise ManifestError(f"{path.name} was altered: its SHA-256 is not the one written")
