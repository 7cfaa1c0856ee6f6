"""`MetricsIndex`: the rows of one metrics.jsonl in a file of the cache, extended as the metrics grow.

    <key>.rows   rows as `rows.ROW`
    <key>.json   the file they were read from (device, inode), its bytes read so far and the last of them, rows

Rows beyond that number were written just before an interruption and are dropped. A metrics file that was replaced,
rewritten or has become shorter is read from its beginning. Until all of a large file is read, samples of the rest stand
for it.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np

from weft.core.json_files import parse_json_table
from weft.ui.rows import ROW, Rows, fields_of, parse_rows, sampled_sums, with_sums, without_repeats

CHUNK_BYTES = 2 * 2**20
TAIL_BYTES = 64  # an inode number may be given to another file
NUM_SAMPLES = 300
SAMPLE_BYTES = 2048
VERSION = 1


class MetricsIndex:
    """`update` reads on, from one thread; `rows` may be called from any."""

    def __init__(self, source: Path, kept: Path) -> None:
        self.source = source
        self._rows_path, self._meta_path = kept.with_suffix(".rows"), kept.with_suffix(".json")
        self._lock = threading.Lock()
        self._file: tuple[int, int] = (0, 0)
        self._offset = self._count = 0
        self._tail = b""
        self.fields: frozenset[str] = frozenset()  # that have values
        self._last = np.zeros(1, dtype=ROW)
        self._load()

    @property
    def is_read(self) -> bool:
        """Whether `rows` has no samples."""
        return self._size() - self._offset <= CHUNK_BYTES

    def file_state(self) -> tuple[int, ...]:
        """Of the metrics file: another one, or a change, has another state."""
        try:
            found = self.source.stat()
        except OSError:
            return ()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    @property
    def state(self) -> tuple[int, int]:
        """Changes whenever `rows` would."""
        return self._offset, self._size()

    def update(self, *, limit: int = CHUNK_BYTES) -> bool:
        """Read at most `limit` bytes of whole lines; whether any were read."""
        try:
            text = self._read_on(limit)
        except FileNotFoundError:
            return False
        end = text.rfind(b"\n") + 1  # a line without an end is still being written
        if end == 0 and len(text) == limit:
            end = limit  # no line of metrics is that long
        if end:
            self._take(parse_rows(text[:end]), num_bytes=end, tail=text[:end][-TAIL_BYTES:])
        return end > 0

    def rows(self) -> tuple[Rows, bool]:
        """All rows, and whether the last part is sampled."""
        with self._lock:
            rows = np.fromfile(self._rows_path, dtype=ROW, count=self._count) if self._count else np.zeros(0, dtype=ROW)
            offset, last = self._offset, self._last.copy()
        if self._size() - offset <= CHUNK_BYTES:
            return rows, False
        return np.concatenate([rows, sample_rows(self.source, offset, last=last[0])]), True

    def _read_on(self, limit: int) -> bytes:
        with self.source.open("rb") as file:
            found = os.fstat(file.fileno())
            file.seek(self._offset - len(self._tail))
            if (found.st_dev, found.st_ino) != self._file or file.read(len(self._tail)) != self._tail:
                self._restart((found.st_dev, found.st_ino))
                file.seek(0)
            return file.read(limit)

    def _take(self, rows: Rows, *, num_bytes: int, tail: bytes) -> None:
        rows = without_repeats(rows)
        with self._lock:
            if len(rows) and self._count and rows["step"][0] <= self._last["step"][0]:
                self._rewind(int(rows["step"][0]))
            if len(rows):
                rows = with_sums(rows, tokens=float(self._last["tokens"][0]), seconds=float(self._last["seconds"][0]))
                with self._rows_path.open("r+b") as file:
                    file.seek(self._count * ROW.itemsize)
                    file.write(rows.tobytes())
                self._count += len(rows)
                self.fields |= fields_of(rows)
                self._last = rows[-1:].copy()
            self._offset, self._tail = self._offset + num_bytes, tail
            self._save()

    def _rewind(self, step: int) -> None:
        """Drop the rows from `step` on."""
        rows = np.fromfile(self._rows_path, dtype=ROW, count=self._count)
        self._count = int(np.searchsorted(rows["step"], step))
        self._last = rows[self._count - 1 : self._count].copy() if self._count else np.zeros(1, dtype=ROW)

    def _restart(self, file: tuple[int, int]) -> None:
        with self._lock:
            self._file, self._offset, self._count, self._tail = file, 0, 0, b""
            self._last = np.zeros(1, dtype=ROW)
            self._rows_path.write_bytes(b"")

    def _load(self) -> None:
        """Continue from the cache; from the beginning without a readable one."""
        try:
            kept = parse_json_table(self._meta_path.read_bytes())
            rows = np.fromfile(self._rows_path, dtype=ROW, count=int(kept["count"]))
            file, offset = (int(kept["device"]), int(kept["inode"])), int(kept["offset"])
            tail, fields = bytes.fromhex(kept["tail"]), frozenset(kept["fields"])
            if kept["version"] != VERSION or kept["width"] != ROW.itemsize or len(rows) != kept["count"]:
                return
        except (OSError, ValueError, KeyError, TypeError):
            return
        self._file, self._offset, self._tail, self.fields = file, offset, tail, fields
        self._count, self._last = len(rows), rows[-1:].copy() if len(rows) else self._last

    def _save(self) -> None:
        device, inode = self._file
        kept = {
            **{"version": VERSION, "width": ROW.itemsize, "device": device, "inode": inode},
            **{"tail": self._tail.hex(), "offset": self._offset},
            **{"count": self._count, "fields": sorted(self.fields)},
        }
        draft = self._meta_path.with_suffix(".tmp")
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(self._meta_path)

    def _size(self) -> int:
        try:
            return self.source.stat().st_size
        except OSError:
            return 0


def sample_rows(source: Path, offset: int, *, last: np.void | None = None, count: int = NUM_SAMPLES) -> Rows:
    """Rows at even distances from `offset` to the end of the file; their sums are estimates, after those of `last`."""
    lines: list[bytes] = []
    try:
        with source.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for place in np.linspace(offset, max(offset, size - SAMPLE_BYTES), count).astype(int):
                lines += os.pread(file.fileno(), SAMPLE_BYTES, int(place)).split(b"\n")[1:2]
            lines += os.pread(file.fileno(), SAMPLE_BYTES, max(0, size - SAMPLE_BYTES)).split(b"\n")[1:-1]
    except OSError:
        return np.zeros(0, dtype=ROW)
    rows = without_repeats(parse_rows(b"\n".join(lines)))
    if last is None:
        return sampled_sums(rows)
    rows = rows[rows["step"] > last["step"]]
    return sampled_sums(rows, step=int(last["step"]), tokens=float(last["tokens"]), seconds=float(last["seconds"]))
