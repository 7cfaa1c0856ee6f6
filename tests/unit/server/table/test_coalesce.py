"""Sums of equal keys."""

from __future__ import annotations

import numpy as np

from weft.server.table.coalesce import coalesce


def test_keys_in_order_of_first_appearance_and_sums_in_order(hard_keys: np.ndarray) -> None:
    generator = np.random.default_rng(0)
    keys = generator.choice(hard_keys, 500)
    values = generator.normal(size=(500, 5)).astype(np.float32)
    expected: dict[int, np.ndarray] = {}
    for key, line in zip(keys.tolist(), values, strict=True):
        expected[key] = expected[key] + line if key in expected else line
    unique, sums = coalesce(keys, values)
    assert unique.tolist() == list(expected)
    np.testing.assert_array_equal(sums, np.stack(list(expected.values())))


def test_read_only_input_and_nothing() -> None:
    keys = np.frombuffer(np.array([3, 3], dtype=np.int64).tobytes(), dtype=np.int64)
    unique, sums = coalesce(keys, np.ones((2, 1), dtype=np.float32))
    assert (unique.tolist(), sums.tolist()) == ([3], [[2.0]])
    unique, sums = coalesce(np.empty(0, dtype=np.int64), np.empty((0, 4), dtype=np.float32))
    assert unique.size == 0
    assert sums.shape == (0, 4)
