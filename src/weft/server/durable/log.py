"""The write-ahead log: every change of a server, in order, written before it is made and acknowledged after.

    record   magic | kind | head bytes | body bytes | number | checksum | head | body

A record's number is its place in the order, from 1. A record counts if its magic, its number (the one after its
predecessor's) and its checksum are right: a torn tail or a file's former content ends the replay there.
Durability "process": an acknowledged record is in the kernel's hands and survives kill -9; "disk": it is synced, many
at a time. A write that fails leaves the log as it was: nothing is acknowledged, nothing is lost, the next may succeed.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import CheckpointError, LogError
from weft.core.synced import sync_path
from weft.server.durable.checksum import checksum
from weft.server.durable.segments import SEGMENT_BYTES, open_segment, retire, segments

_MAGIC = 0x57AF_10C5
_HEAD = struct.Struct("<IIIIQQQ")  # magic, kind, head bytes, padding, body bytes, number, checksum


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    number: int
    kind: int
    head: bytes
    body: NDArray[np.uint8]


class Log:
    """Appends records; the caller's lock orders them."""

    def __init__(self, folder: Path, *, first: int, sync: bool, segment_bytes: int = SEGMENT_BYTES) -> None:
        """`first`: the number of the next record, one above the last that counts."""
        self._folder, self._segment_bytes = folder, segment_bytes
        self.next_number = first
        self.written_bytes = 0  # since the last `retire`
        for _, stale in [segment for segment in segments(folder) if segment[0] >= first]:
            stale.unlink()  # behind a record that did not count: it would follow the new ones as if it were theirs
        if sync:  # records of a process that was killed before its sync: from now on they are acknowledged
            for _, path in segments(folder):
                sync_path(path)
        self._is_synced = sync
        self._file_in_use = threading.Lock()  # a sync must not find its file closed, or another under its number
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
            _write_at(self._file, [start, head, body], self._at)
        except OSError as error:
            raise self._failed(error) from None
        self._at += size
        self.next_number += 1
        self.written_bytes += size
        return number

    def wait_synced(self, number: int) -> None:
        """Returns when the record is on the disk, where that was asked for."""
        if self._syncs is not None:
            self._syncs.wait(number)

    def retire(self, *, before: int) -> None:
        """Records below `before` are needed no more."""
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
            hint="make room on that disk; the server goes on when it can write again",
        )


class _Syncs:
    """One thread that syncs; pushes that came meanwhile share the next sync."""

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
    """The records with numbers above `after`, in order, up to the first that does not count.

    That is where the last write was cut short; anywhere else acknowledged records are missing, which is an error.
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
        body = np.array(content[at + _HEAD.size + head_bytes : end])  # a copy: aligned, and the file may be used again
        if not _is_whole(head, body, number, expected):
            return
        yield LogRecord(number=number, kind=kind, head=head, body=body)
        at, number = end, number + 1


def _is_whole(head: bytes, body: NDArray[np.uint8], number: int, expected: int) -> bool:
    return checksum([head, body], seed=number) == expected


def _write_at(file: int, parts: Sequence[Any], at: int) -> None:
    left = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
    while left:
        count = os.pwritev(file, left[:1000], at)
        at += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
