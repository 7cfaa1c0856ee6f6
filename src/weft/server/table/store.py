"""`Records`: an index and a region of records of one layout; growth, and copies of whole records in and out.

The index grows by half at a load of 3/4, in one pass over its entries; the records never move. A table has two of
these: its rows, and - of width 0 - the candidates for admission.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import TableError
from weft.server.table.index import MAX_ROWS, MAX_SLOTS, NONE, ROWS, SLOTS, Store, move_entries
from weft.server.table.memory import Region
from weft.server.table.record import COUNT, LAST_SEEN, LIVE, MAX_COUNT, META_WORDS, Layout
from weft.server.table.rows import BLOCK, NO_KERNEL, locate_rows, new_scratch, push_rows

MIN_CAPACITY = 1024
MAX_RECORDS = 1 << 31
MEMORY_FACTOR = 4  # of physical memory: what is reserved by default, virtually
NO_CONSTANTS = np.empty(0, dtype=np.float64)


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
        keys: NDArray[np.int64],
        values: NDArray[np.float32],
        slots: NDArray[np.int64],
        *,
        candidates: Records,
        kernel: int,
        lr: float,
        scale: float,
        constants: NDArray[np.float64],
        clock: int,
        visits: int,
        admit_after: int,
    ) -> None:
        """`push_rows` for all keys, with room made on the way."""
        self.require_room([keys])
        done = 0
        while True:
            done += push_rows(
                self.store,
                candidates.store,
                self.layout,
                keys[done:],
                values[done:],
                slots[done:],
                kernel,
                lr,
                scale,
                constants,
                clock,
                visits,
                admit_after,
                new_scratch(),
            )
            if done == keys.size:
                return
            self._make_room()
            candidates._make_room()

    def make(self, keys: NDArray[np.int64], *, clock: int) -> NDArray[np.int64]:
        """Slots of keys; those that are absent get a row with first values, whatever admission says."""
        slots = np.empty(keys.size, dtype=np.int64)
        nothing = np.empty((keys.size, 0), dtype=np.float32)
        self.push(
            keys,
            nothing,
            slots,
            candidates=self,
            kernel=NO_KERNEL,
            lr=0.0,
            scale=0.0,
            constants=NO_CONSTANTS,
            clock=clock,
            visits=0,
            admit_after=1,
        )
        return slots

    def locate(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty(keys.size, dtype=np.int64)
        locate_rows(self.store, keys, found, new_scratch())
        return found

    def live_slots(self, start: int, stop: int) -> NDArray[np.int64]:
        start, stop = max(start, 0), min(stop, self.num_slots)
        return start + np.flatnonzero(self.words[start : max(start, stop), COUNT] >= LIVE)

    def copy_out(self, start: int, stop: int, *, since: int | None = None) -> NDArray[np.uint32]:
        """Words of the live records in slots [start, stop), one record a line, without padding."""
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

    def _reserve(self, wish: int | None, folder: Path | None) -> None:
        """Without a wish: much, or what the system grants. A block of slots beyond it spares kernels a check."""
        record_bytes = 4 * self._stride
        rows = wish or min(MAX_RECORDS, MEMORY_FACTOR * _capacity_bytes(folder) // record_bytes)
        while True:
            try:
                self.region = Region((rows + BLOCK) * record_bytes, folder=folder)
                break
            except OSError as error:
                if wish is not None or rows < MIN_CAPACITY:
                    raise TableError(f"cannot reserve {rows:,} rows of {record_bytes:,} bytes: {error}") from error
                rows //= 2
        self.max_rows = rows
        self.words = np.frombuffer(self.region.memory, np.uint32, (rows + BLOCK) * self._stride).reshape(
            -1, self._stride
        )
        self.floats, self.longs = self.words.view(np.float32), self.words.view(np.int64)

    def _use_index(self, capacity: int) -> None:
        self._index_region = Region(8 * capacity)
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

    def require_room(self, batches: Sequence[NDArray[np.int64]]) -> None:
        """Before anything is changed: half a push could be neither repeated nor taken back."""
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
