"""`coalesce`: one row per key. Sums run in order of appearance, so equal inputs give equal bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weft.server.arrays import Keys, Rows
from weft.server.table.compiled import compiled, kernel_array
from weft.server.table.hashing import fingerprint
from weft.server.table.index import home


@compiled
def _number(keys: Keys, unique: Keys, places: NDArray[np.int32], numbers: NDArray[np.int32]) -> int:
    """Number distinct keys in order of first appearance; places[i] is the number of keys[i]. `numbers` is all -1."""
    capacity = numbers.size
    num_unique = 0
    for i in range(keys.size):
        key = keys[i]
        position = home(fingerprint(key), capacity)
        while numbers[position] >= 0 and unique[numbers[position]] != key:
            position += 1
            if position == capacity:
                position = 0
        if numbers[position] < 0:
            numbers[position] = num_unique
            unique[num_unique] = key
            num_unique += 1
        places[i] = numbers[position]
    return num_unique


@compiled
def _sum_rows(values: Rows, places: NDArray[np.int32], sums: Rows) -> None:
    seen = 0
    for i in range(places.size):
        place = places[i]
        if place == seen:  # a first appearance: copied, so that sums needs no zeros
            seen += 1
            for c in range(values.shape[1]):
                sums[place, c] = values[i, c]
        else:
            for c in range(values.shape[1]):
                sums[place, c] += values[i, c]


def coalesce(keys: Keys, values: Rows) -> tuple[Keys, Rows]:
    """Keys in order of first appearance, and the sum of the rows of each."""
    keys, values = kernel_array(keys, np.int64), kernel_array(values, np.float32)
    unique, places = np.empty(keys.size, dtype=np.int64), np.empty(keys.size, dtype=np.int32)
    numbers = np.full(2 * keys.size + 1, -1, dtype=np.int32)
    num_unique = _number(keys, unique, places, numbers)
    sums = np.empty((num_unique, values.shape[1]), dtype=np.float32)
    _sum_rows(values, places, sums)
    return unique[:num_unique].copy(), sums
