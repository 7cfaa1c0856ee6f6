"""Hashes of keys: the server of a key (bucket) and its place in the index of a table (fingerprint). Both from `mix64`.

    bucket(key)      = mix64(key ^ BUCKET_SALT) >> 54       one of 1,024; servers own buckets
    fingerprint(key) = mix64(key ^ INDEX_SALT)  >> 32       32 bits; the index is ordered by it

Two salts, because the keys of a server share few buckets: with one salt they would cluster in its index.
mix64 is a bijection (the finaliser of MurmurHash3): distinct keys never have equal 64-bit hashes.
"""

from __future__ import annotations

import numpy as np

from weft.server.arrays import Keys
from weft.server.table.compiled import compiled, kernel_array

NUM_BUCKETS = 1024
BUCKET_SALT = np.uint64(0x9E3779B97F4A7C15)
INDEX_SALT = np.uint64(0xD1B54A32D192ED03)

FACTOR_1 = np.uint64(0xFF51AFD7ED558CCD)
FACTOR_2 = np.uint64(0xC4CEB9FE1A85EC53)
SHIFT_33 = np.uint64(33)
SHIFT_54 = np.uint64(54)
SHIFT_32 = np.uint64(32)


@compiled
def mix64(x: np.uint64) -> np.uint64:
    x ^= x >> SHIFT_33
    x *= FACTOR_1
    x ^= x >> SHIFT_33
    x *= FACTOR_2
    return x ^ (x >> SHIFT_33)


@compiled
def fingerprint(key: np.int64) -> np.uint64:
    return mix64(np.uint64(key) ^ INDEX_SALT) >> SHIFT_32


@compiled
def bucket(key: np.int64) -> np.int64:
    return np.int64(mix64(np.uint64(key) ^ BUCKET_SALT) >> SHIFT_54)


def bucket_of(keys: Keys) -> Keys:
    """The bucket of each key, by numpy alone: the same numbers as `bucket`."""
    x = keys.astype(np.int64, copy=False).view(np.uint64) ^ BUCKET_SALT
    x ^= x >> SHIFT_33
    x *= FACTOR_1
    x ^= x >> SHIFT_33
    x *= FACTOR_2
    x ^= x >> SHIFT_33
    return (x >> SHIFT_54).astype(np.int64)


@compiled
def _split(keys: Keys, owners: Keys, order: Keys, ends: Keys) -> None:
    """A counting sort from the back: `ends` holds each server's end, and its start when all is done."""
    for i in range(keys.size):
        ends[owners[bucket(keys[i])]] += 1
    for server in range(1, ends.size):
        ends[server] += ends[server - 1]
    for i in range(keys.size - 1, -1, -1):
        server = owners[bucket(keys[i])]
        ends[server] -= 1
        order[ends[server]] = i


def split(keys: Keys, bucket_to_server: Keys, num_servers: int) -> tuple[Keys, Keys]:
    """Positions of keys by server, in their order: server s has keys[order[starts[s]:starts[s + 1]]]."""
    order = np.empty(keys.size, dtype=np.int64)
    starts = np.zeros(num_servers + 1, dtype=np.int64)  # one more than servers: the last one stays at the end
    _split(kernel_array(keys, np.int64), kernel_array(bucket_to_server, np.int64), order, starts)
    return order, starts
