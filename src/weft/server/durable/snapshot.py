"""Snapshots of a server: full ones, and incremental ones with the changes since their base.

    snapshots/<number>/   table-<t>.rows, table-<t>.deleted, candidates-<t>.rows, shares.bin; manifest.json, last

The number is that of the last log record in the snapshot; rows may be newer, and store their own number. A folder is
written under a draft name, synced and renamed, so it is complete or absent. The manifest holds a checksum for every
piece of a file, verified on reading.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, LogError
from weft.core.json_files import parse_json_table
from weft.core.synced import sync_path, write_all
from weft.server.durable.checksum import checksum

FOLDER = "snapshots"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A committed snapshot. `base`: the number of the snapshot that it adds to; None for a full one."""

    path: Path
    number: int
    base: int | None
    head: dict[str, Any]
    files: dict[str, list[tuple[int, int]]]  # (bytes, checksum) of each piece

    def read(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The pieces of a file, each verified by the manifest; none if the file was not written."""
        path = self.path / name
        if name not in self.files:
            return
        try:
            with path.open("rb") as file:
                for size, expected in self.files[name]:
                    piece = np.fromfile(file, np.uint8, size)
                    if piece.size != size or checksum([piece]) != expected:
                        raise _damaged(path, "incomplete" if piece.size != size else "its checksum is wrong")
                    yield piece
        except OSError as error:
            raise _damaged(path, error.strerror or "unreadable") from None


@dataclass
class SnapshotWriter:
    """Files first, `commit` last; uncommitted drafts are removed at the next start."""

    folder: Path
    number: int
    base: int | None
    _files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draft = self.folder / FOLDER / f".draft-{self.number}"
        with _disk_errors():
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir(parents=True)

    def write(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Appends to a file, piece by piece, so that a table is never in memory twice."""
        sums = self._files.setdefault(name, [])
        with _disk_errors(), (self._draft / name).open("ab", buffering=0) as file:
            for piece in pieces:
                raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                if raw.size:
                    sums.append((raw.size, checksum([raw])))
                    write_all([raw], lambda left, _: os.writev(file.fileno(), left))

    def commit(self, head: dict[str, Any]) -> None:
        manifest = {"number": self.number, "base": self.base, "head": head, "files": self._files}
        with _disk_errors():
            (self._draft / _MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            for path in (*self._draft.iterdir(), self._draft):
                sync_path(path)
            target = self.folder / FOLDER / f"{self.number:020d}"
            if target.exists():  # the same state again: nothing was logged since
                shutil.rmtree(target)
            self._draft.rename(target)
            sync_path(target.parent)


def chain(folder: Path) -> list[Snapshot]:
    """The newest full snapshot and the incremental ones after it, oldest first; empty if there is none."""
    for draft in (folder / FOLDER).glob(".draft-*"):
        shutil.rmtree(draft, ignore_errors=True)
    committed = {snapshot.number: snapshot for snapshot in map(_open, sorted((folder / FOLDER).glob("[0-9]*")))}
    found: list[Snapshot] = []
    number = max(committed, default=None)
    while number is not None:
        if number not in committed:
            raise CheckpointError(f"{folder / FOLDER} lacks the snapshot {number} that a later one adds to")
        found.append(committed[number])
        number = committed[number].base
    return found[::-1]


def drop_older(folder: Path, *, keep: Sequence[Snapshot]) -> None:
    kept = {snapshot.path for snapshot in keep}
    for path in (folder / FOLDER).glob("[0-9]*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _open(path: Path) -> Snapshot:
    try:
        return Snapshot(path=path, **parse_json_table((path / _MANIFEST).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path / _MANIFEST, str(error)) from None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the snapshot file {path} is damaged: {why}", hint="restore the folder from a copy")


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A failed write as a LogError; training continues with the log."""
    try:
        yield
    except OSError as error:
        raise LogError(
            f"a snapshot cannot be written: {error.strerror}", hint="make room on that disk; the log still holds"
        ) from None
