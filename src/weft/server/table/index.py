"""The index: key -> slot of its record. Open addressing with linear probing; kernels only, memory is store.py's.

    entry    = fingerprint << 32 | slot + 1       0 is empty
    position = fingerprint * capacity >> 32       capacity is any number

Positions rise with fingerprints, so growth reads and writes in order and touches no record. An entry whose fingerprint
is equal may belong to another key: the key in the record decides. Deletion shifts back the entries that follow, so
there are no tombstones and probe lengths do not grow with the age of a table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.server.arrays import Keys, Rows
from weft.server.table.compiled import compiled
from weft.server.table.record import COUNT

ROWS, SLOTS, FREE, MAX_ROWS, MAX_SLOTS = 0, 1, 2, 3, 4  # of `counters`
NONE = -1
SHIFT_32 = np.uint64(32)
SLOT_MASK = np.uint64(0xFFFFFFFF)
EMPTY = np.uint64(0)


class Store(NamedTuple):
    """Index and records as kernels see them. The last three are views of one memory, one row per record."""

    entries: NDArray[np.uint64]
    counters: Keys  # live rows, slots ever used, first free slot, rows before growth, slots backed
    longs: Keys
    words: NDArray[np.uint32]
    floats: Rows


@compiled
def home(fingerprint: np.uint64, capacity: int) -> int:
    position: int = np.int64((fingerprint * np.uint64(capacity)) >> SHIFT_32)  # type: ignore[assignment]
    return position


@compiled
def entry_slot(entry: np.uint64) -> int:
    slot: int = np.int64(entry & SLOT_MASK) - 1  # type: ignore[assignment]
    return slot


@compiled
def first_match(index: NDArray[np.uint64], fingerprint: np.uint64) -> int:
    """Slot of the first entry with this fingerprint, not yet verified; NONE where there is none."""
    capacity = index.size
    position = home(fingerprint, capacity)
    while True:
        entry = index[position]
        if entry == EMPTY:
            return NONE
        if entry >> SHIFT_32 == fingerprint:
            return entry_slot(entry)
        position += 1
        if position == capacity:
            position = 0


@compiled
def find_position(store: Store, key: int, fingerprint: np.uint64) -> int:
    """Position of the key's entry, or ~position of the empty one where it would go."""
    capacity = store.entries.size
    position = home(fingerprint, capacity)
    while True:
        entry = store.entries[position]
        if entry == EMPTY:
            return ~position
        if entry >> SHIFT_32 == fingerprint and store.longs[entry_slot(entry), 0] == key:
            return position
        position += 1
        if position == capacity:
            position = 0


@compiled
def find(store: Store, key: int, fingerprint: np.uint64) -> int:
    position = find_position(store, key, fingerprint)
    return NONE if position < 0 else entry_slot(store.entries[position])


@compiled
def insert_at(store: Store, position: int, key: int, fingerprint: np.uint64) -> int:
    """Enter a key at the empty position that `find_position` gave; its record has a key and nothing else yet."""
    counters = store.counters
    slot: int = counters[FREE]
    if slot == NONE:
        slot = counters[SLOTS]
        counters[SLOTS] += 1
    else:
        counters[FREE] = store.longs[slot, 0]
    counters[ROWS] += 1
    store.entries[position] = fingerprint << SHIFT_32 | np.uint64(slot + 1)
    store.longs[slot, 0] = key
    return slot


@compiled
def close_gap(index: NDArray[np.uint64], gap: int) -> None:
    """Empty a position, and shift back every later entry of the run that may stand nearer to its home."""
    capacity = index.size
    position = gap
    while True:
        position += 1
        if position == capacity:
            position = 0
        entry = index[position]
        if entry == EMPTY:
            break
        travelled = position - home(entry >> SHIFT_32, capacity)
        distance = position - gap
        if (travelled + capacity if travelled < 0 else travelled) >= (
            distance + capacity if distance < 0 else distance
        ):
            index[gap] = entry
            gap = position
    index[gap] = EMPTY


@compiled
def remove_at(store: Store, position: int) -> None:
    counters = store.counters
    slot = entry_slot(store.entries[position])
    close_gap(store.entries, position)
    store.longs[slot, 0] = counters[FREE]
    store.words[slot, COUNT] = np.uint32(0)
    counters[FREE] = slot
    counters[ROWS] -= 1


@compiled
def has_room(counters: Keys, num_new: int) -> bool:
    return bool(counters[ROWS] + num_new <= counters[MAX_ROWS] and counters[SLOTS] + num_new <= counters[MAX_SLOTS])


@compiled
def move_entries(old: NDArray[np.uint64], new: NDArray[np.uint64]) -> None:
    """Enter everything of an index into a larger, empty one."""
    capacity = new.size
    for i in range(old.size):
        entry = old[i]
        if entry == EMPTY:
            continue
        position = home(entry >> SHIFT_32, capacity)
        while new[position] != EMPTY:
            position += 1
            if position == capacity:
                position = 0
        new[position] = entry
