"""Kernels over many keys: pull, push, locate, delete. Lookup and work on records are one call, chunk after chunk.

For a chunk of keys, whose slots stay in the nearest cache:
    hash all; probe the index, INDEX_AHEAD keys after prefetching an index line
    work on the records, RECORDS_AHEAD keys after prefetching the lines of a record: verify its key; copy or update
Lines are prefetched long before their use, and each loop is short enough for the processor to look ahead in it too.
A push stops before a block for which the index or the records may lack room; its caller makes room and continues.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.server.arrays import Keys, Rows
from weft.server.table.compiled import compiled
from weft.server.table.hashing import fingerprint
from weft.server.table.index import (
    NONE,
    Store,
    entry_slot,
    find,
    find_position,
    first_match,
    has_room,
    home,
    insert_at,
    remove_at,
)
from weft.server.table.initial import fill_initial
from weft.server.table.prefetch import prefetch, prefetch_far
from weft.server.table.record import COUNT, LAST_SEEN, LIVE, MAX_COUNT, VALUES, Layout
from weft.server.table.updates import update_block

CHUNK = 1024  # keys
BLOCK = 16  # keys of a push whose slots are resolved, then updated; divides CHUNK
INDEX_AHEAD = 32
RECORDS_AHEAD = 48
LINE_WORDS = 16
MAX_WORDS = 1024  # of a record that are prefetched; the processor prefetches the rest of a longer one
NO_KERNEL = -1  # resolve slots, change no values


class Scratch(NamedTuple):
    """Memory for intermediate results: kernels allocate nothing."""

    hashes: NDArray[np.uint64]
    slots: Keys
    here: Keys  # verified slots of the current block
    aside: Keys  # positions of keys that need a full lookup


def new_scratch() -> Scratch:
    return Scratch(
        np.empty(CHUNK, np.uint64), np.empty(CHUNK, np.int64), np.empty(BLOCK, np.int64), np.empty(CHUNK, np.int64)
    )


@compiled
def _probe_index(store: Store, keys: Keys, start: int, stop: int, scratch: Scratch) -> None:
    """Fingerprints of keys[start:stop], and the slots of the first entries that have them: not yet verified."""
    hashes, capacity, size = scratch.hashes, store.entries.size, stop - start
    for i in range(size):
        hashes[i] = fingerprint(keys[start + i])
    for i in range(min(INDEX_AHEAD, size)):
        prefetch(store.entries, home(hashes[i], capacity))
    for i in range(size):
        if i + INDEX_AHEAD < size:
            prefetch(store.entries, home(hashes[i + INDEX_AHEAD], capacity))
        scratch.slots[i] = first_match(store.entries, hashes[i])


@compiled
def _prefetch_record(store: Store, slot: int, words: int) -> None:
    """Prefetch the lines of a record. Up to four lines without a loop, which would cost as much as they do."""
    if slot < 0:
        return
    first = slot * store.words.shape[1]
    prefetch_far(store.words, first)
    prefetch_far(store.words, first + words - 1)
    if words > 2 * LINE_WORDS:
        prefetch_far(store.words, first + LINE_WORDS)
    if words > 3 * LINE_WORDS:
        prefetch_far(store.words, first + 2 * LINE_WORDS)
    if words > 4 * LINE_WORDS:
        prefetch_far(store.words, first + 3 * LINE_WORDS)
    for word in range(4 * LINE_WORDS, (words - 1) // LINE_WORDS * LINE_WORDS, LINE_WORDS):
        prefetch_far(store.words, first + word)


@compiled
def _prefetch_first(store: Store, size: int, scratch: Scratch, words: int) -> None:
    for i in range(min(RECORDS_AHEAD, size)):
        _prefetch_record(store, scratch.slots[i], words)


@compiled
def _set_aside(scratch: Scratch, num_aside: int, i: int) -> int:
    scratch.aside[num_aside] = i
    return num_aside + 1


@compiled
def pull_rows(store: Store, layout: Layout, keys: Keys, out: Rows, scratch: Scratch) -> None:
    """Keys that are absent, or whose fingerprint is another's too, are set aside: the loop over the others is short."""
    dim = layout.dim
    words = min(VALUES + dim, MAX_WORDS)
    for start in range(0, keys.size, CHUNK):
        size = min(CHUNK, keys.size - start)
        _probe_index(store, keys, start, start + size, scratch)
        _prefetch_first(store, size, scratch, words)
        num_aside = 0
        for i in range(size):
            if i + RECORDS_AHEAD < size:
                _prefetch_record(store, scratch.slots[i + RECORDS_AHEAD], words)
            slot = scratch.slots[i]
            if slot != NONE and store.longs[slot, 0] == keys[start + i]:
                for c in range(dim):
                    out[start + i, c] = store.floats[slot, VALUES + c]
            else:
                num_aside = _set_aside(scratch, num_aside, start + i)
        for n in range(num_aside):
            _pull_aside(store, layout, keys, out, scratch.aside[n])


@compiled
def _pull_aside(store: Store, layout: Layout, keys: Keys, out: Rows, i: int) -> None:
    slot = find(store, keys[i], fingerprint(keys[i]))
    if slot == NONE:
        fill_initial(out, i, 0, keys[i], layout)
    else:
        for c in range(layout.dim):
            out[i, c] = store.floats[slot, VALUES + c]


@compiled
def _prefetch_key(store: Store, size: int, scratch: Scratch, i: int) -> None:
    if i < size and scratch.slots[i] >= 0:
        prefetch(store.words, scratch.slots[i] * store.words.shape[1])


@compiled
def locate_rows(store: Store, keys: Keys, found: Keys, scratch: Scratch) -> None:
    for start in range(0, keys.size, CHUNK):
        size = min(CHUNK, keys.size - start)
        _probe_index(store, keys, start, start + size, scratch)
        for i in range(INDEX_AHEAD):
            _prefetch_key(store, size, scratch, i)
        num_aside = 0
        for i in range(size):
            _prefetch_key(store, size, scratch, i + INDEX_AHEAD)
            slot = scratch.slots[i]
            found[start + i] = slot
            if slot != NONE and store.longs[slot, 0] != keys[start + i]:
                num_aside = _set_aside(scratch, num_aside, start + i)
        for n in range(num_aside):
            i = scratch.aside[n]
            found[i] = find(store, keys[i], fingerprint(keys[i]))


@compiled
def _begin(store: Store, layout: Layout, slot: int, key: int, count: int) -> None:
    """First contents of a new record."""
    fill_initial(store.floats, slot, VALUES, key, layout)
    state = VALUES + layout.dim
    for c in range(layout.state_width):
        store.floats[slot, state + c] = np.float32(layout.accumulator if c >= layout.accumulator_start else 0.0)
    store.words[slot, COUNT] = LIVE | np.uint32(count)


@compiled
def _touch(store: Store, slot: int, clock: int, visits: int) -> None:
    store.words[slot, LAST_SEEN] = np.uint32(clock)
    count = store.words[slot, COUNT] & MAX_COUNT
    store.words[slot, COUNT] = LIVE | np.uint32(min(np.int64(count) + visits, np.int64(MAX_COUNT)))


@compiled
def _pushes_before(candidates: Store, key: int, print_: np.uint64, clock: int, admit_after: int) -> int:
    """Pushes of an absent key that came before this one, or NONE while it is not admitted."""
    position = find_position(candidates, key, print_)
    if position < 0:
        slot = insert_at(candidates, ~position, key, print_)
        candidates.words[slot, COUNT] = LIVE
    else:
        slot = entry_slot(candidates.entries[position])
    before: int = np.int64(candidates.words[slot, COUNT] & MAX_COUNT)  # type: ignore[assignment]
    if before + 1 < admit_after:
        _touch(candidates, slot, clock, 1)
        return NONE
    remove_at(candidates, find_position(candidates, key, print_))
    return before


@compiled
def _find_or_insert(
    store: Store, candidates: Store, layout: Layout, key: int, print_: np.uint64, clock: int, admit_after: int
) -> int:
    """The slot of a key, inserted if it is admitted; an earlier key of the push may have inserted it."""
    position = find_position(store, key, print_)
    if position >= 0:
        return entry_slot(store.entries[position])
    before = 0
    if admit_after > 1:
        before = _pushes_before(candidates, key, print_, clock, admit_after)
        if before == NONE:
            return NONE
    slot = insert_at(store, ~position, key, print_)
    _begin(store, layout, slot, key, before)
    return slot


@compiled
def push_rows(
    store: Store,
    candidates: Store,
    layout: Layout,
    keys: Keys,
    values: Rows,
    found: Keys,
    kernel: int,
    lr: float,
    scale: float,
    clock: int,
    visits: int,
    admit_after: int,
    constants: NDArray[np.float64],
    scratch: Scratch,
) -> int:
    """Apply one row of `values` per key; returns the number of finished keys.

    `found` receives the slots of the first found.size keys. The numbers are those of an `Update`, one by one: a tuple
    would cost 3 µs more per call.
    """
    words = min(store.words.shape[1], MAX_WORDS)
    rate, factor, size = np.float32(lr), np.float32(scale), 0
    here = scratch.here
    for start in range(0, keys.size, BLOCK):
        offset = start % CHUNK
        if offset == 0:
            size = min(CHUNK, keys.size - start)
            _probe_index(store, keys, start, start + size, scratch)
            _prefetch_first(store, size, scratch, words)
        if not has_room(store.counters, BLOCK) or (admit_after > 1 and not has_room(candidates.counters, BLOCK)):
            return start
        stop = min(start + BLOCK, keys.size)
        num_aside = 0
        for i in range(offset, offset + stop - start):
            if i + RECORDS_AHEAD < size:
                _prefetch_record(store, scratch.slots[i + RECORDS_AHEAD], words)
            slot = scratch.slots[i]
            if slot != NONE and store.longs[slot, 0] == keys[start + i - offset]:
                here[i - offset] = slot
                _touch(store, slot, clock, visits)
            else:
                num_aside = _set_aside(scratch, num_aside, i - offset)
        for n in range(num_aside):
            i = scratch.aside[n]
            key, print_ = keys[start + i], scratch.hashes[offset + i]
            here[i] = _find_or_insert(store, candidates, layout, key, print_, clock, admit_after)
            if here[i] != NONE:
                _touch(store, here[i], clock, visits)
        for i in range(start, min(stop, found.size)):
            found[i] = here[i - start]
        update_block(kernel, store.floats, here, values, start, stop, rate, factor, constants)
    return keys.size


@compiled
def delete_rows(store: Store, keys: Keys) -> int:
    num_deleted = 0
    for i in range(keys.size):
        position = find_position(store, keys[i], fingerprint(keys[i]))
        if position >= 0:
            remove_at(store, position)
            num_deleted += 1
    return num_deleted
