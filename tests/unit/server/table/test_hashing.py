"""Buckets, fingerprints, and the split of keys among servers."""

from __future__ import annotations

import numpy as np

from weft.server.table.hashing import NUM_BUCKETS, bucket, bucket_of, fingerprint, split


def test_numpy_and_compiled_buckets_are_equal_and_even(hard_keys: np.ndarray) -> None:
    keys = np.concatenate([hard_keys, np.arange(20_000)])
    buckets = bucket_of(keys)
    assert buckets.tolist() == [bucket(key) for key in keys]
    counts = np.bincount(buckets, minlength=NUM_BUCKETS)
    assert counts.size == NUM_BUCKETS
    assert counts.max() < 50  # 20 a bucket on average


def test_hard_keys_share_fingerprints_and_differ(hard_keys: np.ndarray) -> None:
    prints = [int(fingerprint(key)) for key in hard_keys]
    assert prints.count(0xFFFFFFFF) == 6
    assert len(set(hard_keys.tolist())) == len(hard_keys)


def test_fingerprints_of_one_bucket_are_spread() -> None:
    """With one salt for both, a server's keys would crowd a thousandth of its index."""
    keys = np.arange(200_000)
    keys = keys[bucket_of(keys) == 3]
    prints = np.array([int(fingerprint(key)) for key in keys])
    assert np.bincount(prints >> 29, minlength=8).min() > keys.size / 16


def test_split_is_a_stable_sort_by_server(hard_keys: np.ndarray) -> None:
    keys = np.concatenate([np.arange(5000), hard_keys])
    owners = np.arange(NUM_BUCKETS) * 5 // NUM_BUCKETS
    order, starts = split(keys, owners, 6)
    servers = owners[bucket_of(keys)]
    assert order.tolist() == np.argsort(servers, kind="stable").tolist()
    assert starts.tolist() == [0, *np.cumsum(np.bincount(servers, minlength=6)).tolist()]


def test_split_of_nothing() -> None:
    order, starts = split(np.empty(0, dtype=np.int64), np.zeros(NUM_BUCKETS, dtype=np.int64), 2)
    assert order.size == 0
    assert starts.tolist() == [0, 0, 0]
