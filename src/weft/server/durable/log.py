"""The write-ahead log: every change of a server, in order, written before it is applied and acknowledged after.

    record   magic | kind | head bytes | body bytes | number | checksum | head | body

A record's number is its place in the order, from 1. A record is valid if its magic, its number (its predecessor's plus
one) and its checksum are right: replay ends at a torn tail or at old content of a reused file.
Durability "process": an acknowledged record is in the page cache and survives kill -9; "disk": it is synced, many at a
time. A failed write leaves the log unchanged: nothing is acknowledged, nothing is lost, the next write may succeed.
A segment file is named after its first record. A snapshot frees segments, and freed files are reused: overwriting pages
costs a fourth to a tenth of growing a file.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, LogError
from weft.core.synced import sync_path, write_all
from weft.server.durable.checksum import checksum

SEGMENT_BYTES = 64 << 20
SPARES = 16  # files kept for reuse: as many as a log fills between two automatic snapshots
LEAST_FREE_BYTES = 256 << 20  # on a disk with less, spares would take the space of snapshots
_NAME = "log-{:020d}.wal"
_SPARE = "spare-{:02d}.wal"
_MAGIC = 0x57AF_10C5
_HEAD = struct.Struct("<IIIIQQQ")  # magic, kind, head bytes, padding, body bytes, number, checksum


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(first record, path), oldest first."""
    return sorted((int(path.stem.removeprefix("log-")), path) for path in folder.glob("log-*.wal"))


def open_segment(folder: Path, first: int) -> int:
    """A file descriptor for a new segment: a renamed spare file if there is one."""
    target = folder / _NAME.format(first)
    for number in range(SPARES):
        try:
            (folder / _SPARE.format(number)).rename(target)
            return os.open(target, os.O_RDWR)
        except FileNotFoundError:
            continue
    return os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)


def retire(folder: Path, *, before: int) -> None:
    """Drop segments that hold only records below `before`; up to SPARES become spares."""
    for (_, path), (following, _) in pairwise(segments(folder)):
        if following > before:
            return
        spare = next((s for s in map(_SPARE.format, range(SPARES)) if not (folder / s).exists()), None)
        path.rename(folder / spare) if spare and _has_room(folder) else path.unlink()


def _has_room(folder: Path) -> bool:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize >= LEAST_FREE_BYTES


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    number: int
    kind: int
    head: bytes
    body: NDArray[np.uint8]


class Log:
    """Appends records; the caller's lock orders them."""

    def __init__(self, folder: Path, *, first: int, sync: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`first`: the number of the next record, one above the last valid one."""
        self._folder, self._segment_bytes = folder, segment_bytes
        self.next_number = first
        self.written_bytes = 0  # since the last `retire`
        for _, stale in [segment for segment in segments(folder) if segment[0] >= first]:
            stale.unlink()  # behind an invalid record: replay would take it for a successor of the new ones
        if sync:  # records of a process that was killed before its sync: from now on they count as acknowledged
            for _, path in segments(folder):
                sync_path(path)
        self._is_synced = sync
        self._file_in_use = threading.Lock()  # a sync must not find its descriptor closed or reused
        self._file, self._at = self._new_segment()
        self._syncs = _Syncs(self) if sync else None

    def append(self, kind: int, head: bytes, body: NDArray[np.uint8]) -> int:
        """Writes one record and returns its number."""
        size = _HEAD.size + len(head) + body.size
        if self._at and self._at + size > self._segment_bytes:
            self._roll()
        number = self.next_number
        found = checksum([head, body], seed=number)
        start = _HEAD.pack(_MAGIC, kind, len(head), 0, body.size, number, found)
        try:
            write_all([start, head, body], lambda left, done: os.pwritev(self._file, left[:1000], self._at + done))
        except OSError as error:
            raise self._failed(error) from None
        self._at += size
        self.next_number += 1
        self.written_bytes += size
        return number

    def wait_synced(self, number: int) -> None:
        """Returns when the record is on disk, if the log is synced."""
        if self._syncs is not None:
            self._syncs.wait(number)

    def retire(self, *, before: int) -> None:
        """Frees the segments of records below `before`."""
        self.written_bytes = 0
        retire(self._folder, before=before)

    def sync(self) -> None:
        with self._file_in_use:
            os.fdatasync(self._file)

    def close(self) -> None:
        if self._syncs is not None:
            self._syncs.stop()
        with self._file_in_use:
            os.close(self._file)

    def _roll(self) -> None:
        try:
            if self._is_synced:
                self.sync()  # a later sync would reach the new file only
            fresh, at = self._new_segment()
        except OSError as error:
            raise self._failed(error) from None
        with self._file_in_use:
            os.close(self._file)
            self._file, self._at = fresh, at

    def _new_segment(self) -> tuple[int, int]:
        file = open_segment(self._folder, self.next_number)
        if self._is_synced:
            sync_path(self._folder)  # or the new file's name may not survive the machine
        return file, 0

    def _failed(self, error: OSError) -> LogError:
        return LogError(
            f"the server's log in {self._folder} cannot be written: {error.strerror}",
            hint="make room on that disk; the server continues when it can write again",
        )


class _Syncs:
    """One thread that syncs; pushes that arrive meanwhile share the next sync."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._state = threading.Condition()
        self._wanted, self._done, self._failure, self._is_over = 0, 0, "", False
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, number: int) -> None:
        with self._state:
            self._wanted = max(self._wanted, number)
            self._state.notify_all()
            self._state.wait_for(lambda: self._done >= number or self._failure or self._is_over)
            if self._done < number:
                raise LogError(f"the server's log could not be synced: {self._failure or 'the server stops'}")

    def stop(self) -> None:
        with self._state:
            self._is_over = True
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._wanted > self._done or self._is_over)
                if self._is_over:
                    return
                target = self._wanted
            try:
                self._log.sync()
                failure = ""
            except OSError as error:
                failure = str(error.strerror)
            with self._state:
                self._done, self._failure = (self._done if failure else max(self._done, target)), failure
                self._state.notify_all()


def replay(folder: Path, *, after: int) -> Iterator[LogRecord]:
    """The records with numbers above `after`, in order, up to the first invalid one.

    That is where the last write was interrupted; anywhere else acknowledged records are missing, which is an error.
    """
    expected = after + 1
    for first, path in segments(folder):
        if first > expected:
            raise CheckpointError(
                f"the server's log lacks the records {expected:,} to {first - 1:,}: {path.parent} is damaged",
                hint="start from a copy of the folder, or from an older export",
            )
        for record in _records(path, first):
            if record.number >= expected:
                expected = record.number + 1
                yield record


def _records(path: Path, first: int) -> Iterator[LogRecord]:
    content = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    at, number = 0, first
    while at + _HEAD.size <= content.size:
        magic, kind, head_bytes, _, body_bytes, found, expected = _HEAD.unpack(content[at : at + _HEAD.size].tobytes())
        end = at + _HEAD.size + head_bytes + body_bytes
        if magic != _MAGIC or found != number or end > content.size:
            return
        head = content[at + _HEAD.size : at + _HEAD.size + head_bytes].tobytes()
        body = np.array(content[at + _HEAD.size + head_bytes : end])  # a copy: aligned, and the file may be reused
        if checksum([head, body], seed=number) != expected:
            return
        yield LogRecord(number=number, kind=kind, head=head, body=body)
        at, number = end, number + 1
