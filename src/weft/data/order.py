"""Order: a seeded permutation of [0, size) that needs no table, for any size, with random access.

Element i of the order is a pure function of (i, size, seed, epoch), so a run can be resumed, or split over any number
of ranks, at any sample. A Feistel network permutes the next power of four; results outside [0, size) are permuted
again until they fall inside (on average under four times).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 8  # four make a strong permutation of a large domain; small ones need more to look shuffled
_MASK_64 = (1 << 64) - 1


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijective hash of 64-bit words (the finaliser of the SplitMix64 generator)."""
    words = values + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(
    indices: NDArray[np.int64], *, size: int, seed: int, epoch: int | NDArray[np.int64] = 0
) -> NDArray[np.int64]:
    """The new place of each index; `epoch`: one number, or one per index; each has its own permutation."""
    _require_inside(indices, size=size)
    epochs = np.broadcast_to(np.asarray(epoch, dtype=np.int64), indices.shape).astype(np.uint64)
    keys = _round_keys(epochs, seed=seed)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    result = indices.astype(np.uint64)
    outside = np.ones(indices.shape, dtype=bool)
    while outside.any():
        result[outside] = _feistel(result[outside], keys=keys[:, outside], half_bits=half_bits)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _round_keys(epochs: NDArray[np.uint64], *, seed: int) -> NDArray[np.uint64]:
    """One key for each round and index: [NUM_ROUNDS, *epochs.shape]."""
    root = mix64(np.array([seed & _MASK_64, (seed >> 64) & _MASK_64], dtype=np.uint64))
    of_epoch = mix64(root[0] ^ mix64(epochs ^ root[1]))
    rounds = np.arange(NUM_ROUNDS, dtype=np.uint64).reshape(-1, *[1] * epochs.ndim)
    return mix64(of_epoch[np.newaxis] ^ mix64(rounds))


def _feistel(values: NDArray[np.uint64], *, keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << shift) | right


def _require_inside(indices: NDArray[Any], *, size: int) -> None:
    if size < 1 or (indices.size and (indices.min() < 0 or indices.max() >= size)):
        # Outside the domain the network would return an index that another element has too.
        raise IndexError(f"indices must lie in [0, {size})")
