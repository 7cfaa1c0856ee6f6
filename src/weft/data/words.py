"""Stored words of samples: a token id, and in the highest bit whether it counts (has a loss).

One array holds both, so that stores, parts, splits and packing handle samples as they handle text. Text has no such
bit: all its tokens count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.integer[Any]]


def word_dtype(vocab_size: int, *, has_mask: bool) -> np.dtype[np.unsignedinteger]:
    """The smallest dtype of token ids, with one bit more for a mask."""
    return np.dtype(np.uint16 if vocab_size << has_mask < 1 << 16 else np.uint32)


def to_words(tokens: Words, counted: NDArray[np.bool_], *, vocab_size: int) -> Words:
    dtype = word_dtype(vocab_size, has_mask=True)
    return (tokens.astype(np.int64) | counted * _mask_bit(dtype)).astype(dtype)


def tokens_of(words: Words, dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """The ids of words read from a store of `dtype`."""
    return words.astype(np.int64) & (_mask_bit(dtype) - 1)


def counted_of(words: Words, dtype: np.dtype[Any]) -> NDArray[np.bool_]:
    counted: NDArray[np.bool_] = (words.astype(np.int64) & _mask_bit(dtype)).astype(bool)
    return counted


def _mask_bit(dtype: np.dtype[Any]) -> int:
    return int(1 << (8 * dtype.itemsize - 1))
