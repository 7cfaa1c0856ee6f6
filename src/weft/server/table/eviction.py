"""Rows to evict, and hot rows: chosen by the counters of the records alone, in numpy. Nothing is dropped here.

max_age     clock - last_seen > max_age
min_count   count < min_count
max_rows    the rest by the least (count, last_seen) until max_rows remain; among equals the largest keys
"""

from __future__ import annotations

import numpy as np

from weft.core.table_spec import Eviction
from weft.server.arrays import Keys
from weft.server.table.record import COUNT, LAST_SEEN, MAX_COUNT
from weft.server.table.store import Records


def _counters(records: Records) -> tuple[Keys, Keys, Keys]:
    """Keys, last_seen and counts of the live rows."""
    slots = records.live_slots(0, records.num_slots)
    meta = records.words[slots, LAST_SEEN : COUNT + 1]
    return records.longs[slots, 0], meta[:, 0].astype(np.int64), (meta[:, 1] & MAX_COUNT).astype(np.int64)


def _least(scores: Keys, keys: Keys, num_least: int) -> Keys:
    """Positions of the `num_least` smallest scores; among equals the largest keys."""
    bound = np.partition(scores, num_least - 1)[num_least - 1]
    below = np.flatnonzero(scores < bound)
    equal = np.flatnonzero(scores == bound)
    by_key = np.argsort(keys[equal])[::-1]
    return np.concatenate([below, equal[by_key[: num_least - below.size]]])


def victims(records: Records, eviction: Eviction, *, clock: int) -> Keys:
    """Keys to drop, ascending."""
    keys, last_seen, counts = _counters(records)
    goes = np.zeros(keys.size, dtype=np.bool_)
    if eviction.max_age is not None:
        goes |= clock - last_seen > eviction.max_age
    if eviction.min_count is not None:
        goes |= counts < eviction.min_count
    stays = np.flatnonzero(~goes)
    if eviction.max_rows is not None and stays.size > eviction.max_rows:
        scores = counts[stays] << 32 | last_seen[stays]
        goes[stays[_least(scores, keys[stays], stays.size - eviction.max_rows)]] = True
    return np.sort(keys[goes])


def hot(records: Records, top: int) -> tuple[Keys, Keys]:
    """The rows touched most often, the most frequent first; among equals the smallest keys."""
    keys, _, counts = _counters(records)
    top = min(top, keys.size)
    if top <= 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    bound = np.partition(counts, keys.size - top)[keys.size - top]
    near = np.flatnonzero(counts >= bound)
    order = near[np.lexsort((keys[near], -counts[near]))[:top]]
    return keys[order], counts[order]
