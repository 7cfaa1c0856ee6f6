"""`MemoryFile`: one copy of a rank's state in a memory file that the rank's process does not own, so it outlives it.

    page 0   where the record is, and its SHA-256; zeros: no copy
    data     tensors, aligned
    record   JSON: step, owner, layout, meta, the checksum of the data

Page 0 is cleared before the data change and written after everything else: a kill at any moment leaves either a whole
copy or none. Nothing here communicates or allocates memory of a device.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.checkpoint.span_sums import span_sum

PAGE_BYTES = 4096
_ALIGNMENT_BYTES = 64
_MAGIC = b"weftcopy"
_PREFIX = struct.Struct("<8sQQ32s")  # magic, begin and length of the record, its digest


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """What a copy holds: the state of rank `owner` after `step`. `table` is the digest of its tensors' places."""

    step: int
    owner: int
    layout: str
    table: str
    size_bytes: int
    checksum: int
    meta: dict[str, Any]


@dataclass(frozen=True)
class StateTable:
    """Where each tensor of a state lies in the data."""

    rows: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]  # key, begin, shape, dtype
    size_bytes: int

    @staticmethod
    def of(shards: dict[str, Tensor]) -> StateTable:
        rows, end = [], 0
        for key, shard in shards.items():
            rows.append((key, end, tuple(shard.shape), shard.dtype))
            end += -(-shard.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return StateTable(tuple(rows), _whole_pages(end))

    @property
    def digest(self) -> str:
        listed = [[key, begin, shape, str(dtype)] for key, begin, shape, dtype in self.rows]
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def views(self, data: Tensor) -> dict[str, Tensor]:
        """Each tensor in the bytes of a copy."""
        found = {}
        for key, begin, shape, dtype in self.rows:
            numel = 1
            for size in shape:
                numel *= size
            found[key] = data[begin : begin + numel * dtype.itemsize].view(dtype).view(shape)
        return found


class MemoryFile:
    """See the module. `path` is an existing, writable memory file, of any size."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self._file).st_blocks * 512

    def read(self) -> CopyRecord | None:
        """The record of a whole copy; its data are not checked yet. None: there is no copy."""
        prefix = os.pread(self._file, _PREFIX.size, 0)
        if len(prefix) < _PREFIX.size:
            return None
        magic, begin, length, digest = _PREFIX.unpack(prefix)
        if magic != _MAGIC:
            return None
        text = os.pread(self._file, length, begin)
        if hashlib.sha256(text).digest() != digest:
            return None
        return CopyRecord(**json.loads(text))

    def clear(self) -> None:
        """There is no copy from here on."""
        if os.fstat(self._file).st_size:
            os.pwrite(self._file, bytes(_PREFIX.size), 0)

    def data(self, size_bytes: int) -> Tensor:
        """The bytes of the data, to read or to write; grows the file. To write: `clear` first, `commit` after."""
        end = PAGE_BYTES + size_bytes
        if os.fstat(self._file).st_size < end:
            os.ftruncate(self._file, end)
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self._file, end)  # an older map lives as long as tensors on it
        return torch.frombuffer(self._map, dtype=torch.uint8)[PAGE_BYTES:end]

    def sum_of(self, size_bytes: int) -> int:
        return span_sum(self.data(size_bytes).numpy().data)

    def commit(self, record: CopyRecord) -> None:
        """The data are those of the record."""
        text = json.dumps(asdict(record)).encode()
        begin = PAGE_BYTES + record.size_bytes
        os.pwrite(self._file, text, begin)
        os.pwrite(self._file, _PREFIX.pack(_MAGIC, begin, len(text), hashlib.sha256(text).digest()), 0)

    def problem(self, record: CopyRecord) -> str:
        """Why the data are not those of the record, or ""."""
        if os.fstat(self._file).st_size < PAGE_BYTES + record.size_bytes:
            return "it is cut short"
        return "" if self.sum_of(record.size_bytes) == record.checksum else "its checksum differs"

    def close(self) -> None:
        os.close(self._file)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
