"""Snapshots of a server: whole ones, and incremental ones that hold what changed since the one before.

    snapshots/<number>/   table-<t>.rows, table-<t>.deleted, candidates-<t>.rows, shares.bin; manifest.json, last

The number is that of the last log record whose effects on everything but rows it holds; rows may be newer, and say so
themselves. A folder is written under another name, synced and renamed: it is there whole or not at all. Every piece of
a file has its checksum in the manifest, compared when it is read.
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
from weft.core.synced import sync_path
from weft.server.durable.checksum import checksum

FOLDER = "snapshots"
_MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A committed one. `base`: the number of the one that it adds to; None where it is whole."""

    path: Path
    number: int
    base: int | None
    head: dict[str, Any]
    files: dict[str, list[tuple[int, int]]]  # (bytes, checksum) of each piece

    def read(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """A file's pieces, each compared with the manifest; none where it was not written."""
        path = self.path / name
        if name not in self.files:
            return
        try:
            with path.open("rb") as file:
                for size, expected in self.files[name]:
                    piece = np.fromfile(file, np.uint8, size)
                    if piece.size != size or checksum([piece]) != expected:
                        raise _damaged(path, "cut short" if piece.size != size else "its checksum is wrong")
                    yield piece
        except OSError as error:
            raise _damaged(path, error.strerror or "unreadable") from None


@dataclass
class SnapshotWriter:
    """Files first, `commit` last; what was not committed is swept away at the next start."""

    folder: Path
    number: int
    base: int | None
    _files: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._draft = self.folder / FOLDER / f".draft-{self.number}"
        with _told():
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir(parents=True)

    def write(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Adds to a file; pieces are written as they come, so that a table is never in memory twice."""
        told = self._files.setdefault(name, [])
        with _told(), (self._draft / name).open("ab", buffering=0) as file:
            for piece in pieces:
                raw = np.ascontiguousarray(piece).reshape(-1).view(np.uint8)
                if raw.size:
                    told.append((raw.size, checksum([raw])))
                    _write_all(file.fileno(), raw)

    def commit(self, head: dict[str, Any]) -> None:
        told = {"number": self.number, "base": self.base, "head": head, "files": self._files}
        with _told():
            (self._draft / _MANIFEST).write_text(json.dumps(told), encoding="utf-8")
            for path in (*self._draft.iterdir(), self._draft):
                sync_path(path)
            target = self.folder / FOLDER / f"{self.number:020d}"
            if target.exists():  # the same state again: nothing was logged since
                shutil.rmtree(target)
            self._draft.rename(target)
            sync_path(target.parent)


def chain(folder: Path) -> list[Snapshot]:
    """The newest whole snapshot and what was added to it, oldest first; empty where there is none."""
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
        told = parse_json_table((path / _MANIFEST).read_bytes())
        return Snapshot(path=path, **told)
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path / _MANIFEST, str(error)) from None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"the snapshot file {path} is damaged: {why}", hint="restore the folder from a copy")


def _write_all(file: int, raw: NDArray[np.uint8]) -> None:
    left = raw.data
    while left.nbytes:
        left = left[os.write(file, left) :]


@contextmanager
def _told() -> Iterator[None]:
    """A full disk in one sentence; training goes on with the log."""
    try:
        yield
    except OSError as error:
        raise LogError(
            f"a snapshot cannot be written: {error.strerror}", hint="make room on that disk; the log still holds"
        ) from None
