"""Keys that hurt: extremes, and many with one fingerprint, found by inverting the hash."""

from __future__ import annotations

import numpy as np
import pytest

from weft.server.table.hashing import FACTOR_1, FACTOR_2, INDEX_SALT

MASK = (1 << 64) - 1


def unmix64(hashed: int) -> int:
    hashed ^= hashed >> 33
    hashed = hashed * pow(int(FACTOR_2), -1, 1 << 64) & MASK
    hashed ^= hashed >> 33
    hashed = hashed * pow(int(FACTOR_1), -1, 1 << 64) & MASK
    return hashed ^ hashed >> 33


def key_of(fingerprint: int, low: int) -> int:
    """A key with this fingerprint; each `low` gives another."""
    unsigned = unmix64(fingerprint << 32 | low) ^ int(INDEX_SALT)
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned


HARD_KEYS: list[int] = [
    0,
    -1,
    1,
    np.iinfo(np.int64).min,
    np.iinfo(np.int64).max,
    *(key_of(0xFFFFFFFF, low) for low in range(6)),  # one fingerprint, at the index's end: the run wraps around
    *(key_of(0xFFFFFFFF - step, 7) for step in range(1, 5)),
    *(key_of(0, low) for low in range(3)),
    *(key_of(0x80000000, low) for low in range(3)),
]


@pytest.fixture
def hard_keys() -> np.ndarray:
    return np.array(HARD_KEYS, dtype=np.int64)
