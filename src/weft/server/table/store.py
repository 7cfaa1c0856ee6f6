"""`Records`: an index and a memory region of records of one layout; growth, and copies of whole records in and out.

The index grows by half at a load of 3/4, in one pass over its entries; the records never move. A table has two of
these: its rows, and - of width 0 - the candidates for admission. A region reserves address space, which costs nothing
until it is touched:

    memory   anonymous, MAP_NORESERVE, huge pages requested (random rows are 1.4-1.8 times faster on them)
    mapped   a sparse file without a name: gone with the process, however that ends
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import TableError
from weft.server.arrays import Keys, Rows
from weft.server.table.index import MAX_ROWS, MAX_SLOTS, NONE, ROWS, SLOTS, Store, move_entries
from weft.server.table.record import COUNT, LAST_SEEN, LIVE, MAX_COUNT, META_WORDS, Layout, Update
from weft.server.table.rows import BLOCK, NO_KERNEL, locate_rows, new_scratch, push_rows

MAP_NORESERVE = 0x4000
STEP_BYTES = 64 << 20  # of disk that a mapped region asks for at a time
MIN_CAPACITY = 1024
MAX_RECORDS = 1 << 31
MEMORY_FACTOR = 4  # of physical memory: what is reserved by default, virtually
NO_CONSTANTS = np.empty(0, dtype=np.float64)


class MemoryRegion:
    """Reserved bytes, of which the first `backed_bytes` may be touched; `back` extends them."""

    def __init__(self, num_bytes: int, *, folder: Path | None = None) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._file: int | None = None
        if folder is None:
            self.memory, self.backed_bytes = self._anonymous(), self.num_bytes
        else:
            self.memory, self.backed_bytes = self._mapped(folder), 0

    def _anonymous(self) -> mmap.mmap:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        memory = mmap.mmap(-1, self.num_bytes, flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _mapped(self, folder: Path) -> mmap.mmap:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(self.num_bytes)
            self._file = os.dup(file.fileno())
        memory = mmap.mmap(self._file, self.num_bytes)
        memory.madvise(mmap.MADV_RANDOM)  # or each missing row would read its neighbours from disk
        return memory

    def back(self, num_bytes: int) -> None:
        """Allocate disk for the first `num_bytes`: a full disk is an error here, and a SIGBUS later."""
        if self._file is None or num_bytes <= self.backed_bytes:
            return
        wanted = min(self.num_bytes, -(-num_bytes // STEP_BYTES) * STEP_BYTES)
        try:
            os.posix_fallocate(self._file, self.backed_bytes, wanted - self.backed_bytes)
        except OSError as error:
            raise TableError(
                f"no disk for {wanted - self.backed_bytes:,} more bytes of a mapped table: {error.strerror}",
                hint="free space in the server's folder, or evict rows",
            ) from error
        self.backed_bytes = wanted

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]
            self._file = None


class Records:
    def __init__(self, layout: Layout, *, reserve: int | None = None, folder: Path | None = None) -> None:
        self.layout = layout
        self.num_words = META_WORDS + layout.dim + layout.state_width
        self._stride = self.num_words + self.num_words % 2
        self._reserve(reserve, folder)
        self.counters = np.array([0, 0, NONE, 0, 0], dtype=np.int64)
        self._use_index(MIN_CAPACITY)
        self._back_slots()

    @property
    def num_rows(self) -> int:
        return int(self.counters[ROWS])

    @property
    def num_slots(self) -> int:
        return int(self.counters[SLOTS])

    @property
    def nbytes(self) -> int:
        return self.num_slots * self._stride * 4 + self.index.nbytes

    def push(
        self,
        keys: Keys,
        values: Rows,
        slots: Keys,
        update: Update,
        *,
        candidates: Records,
        constants: NDArray[np.float64],
    ) -> None:
        """`push_rows` for all keys; index and records grow as needed."""
        self.require_room([keys])
        done = 0
        while True:
            stores, left = (self.store, candidates.store, self.layout), (keys[done:], values[done:], slots[done:])
            done += push_rows(*stores, *left, *update, constants, new_scratch())  # type: ignore[arg-type]
            if done == keys.size:
                return
            self._make_room()
            candidates._make_room()

    def make(self, keys: Keys, *, clock: int) -> Keys:
        """Slots of keys; absent keys get a row with initial values, without admission."""
        slots = np.empty(keys.size, dtype=np.int64)
        nothing = np.empty((keys.size, 0), dtype=np.float32)
        update = Update(NO_KERNEL, lr=0.0, scale=0.0, clock=clock, visits=0, admit_after=1)
        self.push(keys, nothing, slots, update, candidates=self, constants=NO_CONSTANTS)
        return slots

    def locate(self, keys: Keys) -> Keys:
        found = np.empty(keys.size, dtype=np.int64)
        locate_rows(self.store, keys, found, new_scratch())
        return found

    def live_slots(self, start: int, stop: int) -> Keys:
        start, stop = max(start, 0), min(stop, self.num_slots)
        return start + np.flatnonzero(self.words[start : max(start, stop), COUNT] >= LIVE)

    def copy_out(self, start: int, stop: int, *, since: int | None = None) -> NDArray[np.uint32]:
        """Words of the live records in slots [start, stop), one row per record, without padding."""
        slots = self.live_slots(start, stop)
        if since is not None:
            slots = slots[self.words[slots, LAST_SEEN] >= since]
        words = np.ascontiguousarray(self.words[slots][:, : self.num_words])
        words[:, COUNT] &= MAX_COUNT
        return words

    def copy_in(self, records: NDArray[np.void]) -> None:
        packed = np.ascontiguousarray(records)
        words = packed.view(np.uint32).reshape(len(packed), self.num_words)
        slots = self.make(np.ascontiguousarray(packed["key"]), clock=0)
        self.words[slots, : self.num_words] = words
        self.words[slots, COUNT] |= LIVE

    def _reserve(self, wanted: int | None, folder: Path | None) -> None:
        """By default: a multiple of memory, halved until granted. One more block of slots saves kernels a check."""
        record_bytes = 4 * self._stride
        rows = wanted or min(MAX_RECORDS, MEMORY_FACTOR * _capacity_bytes(folder) // record_bytes)
        while True:
            try:
                self.region = MemoryRegion((rows + BLOCK) * record_bytes, folder=folder)
                break
            except OSError as error:
                if wanted is not None or rows < MIN_CAPACITY:
                    raise TableError(f"cannot reserve {rows:,} rows of {record_bytes:,} bytes: {error}") from error
                rows //= 2
        self.max_rows = rows
        self.words = np.frombuffer(self.region.memory, np.uint32, (rows + BLOCK) * self._stride).reshape(
            -1, self._stride
        )
        self.floats, self.longs = self.words.view(np.float32), self.words.view(np.int64)

    def _use_index(self, capacity: int) -> None:
        self._index_region = MemoryRegion(8 * capacity)
        self.index: NDArray[np.uint64] = np.frombuffer(self._index_region.memory, np.uint64, capacity)
        self.counters[MAX_ROWS] = capacity * 3 // 4
        self.store = Store(self.index, self.counters, self.longs, self.words, self.floats)

    def _back_slots(self) -> None:
        num_slots = min(self.num_slots + BLOCK, len(self.words))
        self.region.back(num_slots * self._stride * 4)
        self.counters[MAX_SLOTS] = min(self.region.backed_bytes // (4 * self._stride), len(self.words))

    def _make_room(self) -> None:
        """For one more block of rows."""
        self._back_slots()
        if self.num_slots + BLOCK > self.counters[MAX_SLOTS]:  # candidates: rows are counted before a push begins
            raise TableError(f"no room for more than {self.max_rows:,} candidates", hint="evict by max_age")
        if self.num_rows + BLOCK > self.counters[MAX_ROWS]:
            old = self.index
            self._use_index(len(old) + len(old) // 2)
            move_entries(old, self.index)

    def require_room(self, batches: Sequence[Keys]) -> None:
        """Checked before any change: half a push could be neither repeated nor undone."""
        if self.num_rows + sum(keys.size for keys in batches) <= self.max_rows:
            return
        keys = np.concatenate(batches)
        num_new = np.unique(keys[self.locate(keys) < 0]).size
        if self.num_rows + num_new > self.max_rows:
            raise TableError(
                f"the table is full: {self.num_rows:,} rows, room for {self.max_rows:,}, {num_new:,} new keys",
                hint="evict rows, add servers, or reserve more",
            )


def _capacity_bytes(folder: Path | None) -> int:
    """Physical memory, or the size of the folder's disk."""
    if folder is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).total
