"""Samples of a click log as arrays: keys of categorical values, numeric fields, labels.

One table holds every field, so a key depends on its field too:

    key(field, value) = mix64(mix64(field + 1) ^ value)      value: 64 bits, of a number or of a string's bytes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.order import mix64

_LENGTH_SALT = np.uint64(0x5851F42D4C957F2D)
_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class ClickBatch:
    """Some samples, one row each."""

    keys: NDArray[np.int64]  # [samples, categorical fields]
    numeric: NDArray[np.float32]  # [samples, numeric fields], already on a logarithmic scale; a missing one is 0
    labels: NDArray[np.float32]  # [samples], 0 or 1

    def __len__(self) -> int:
        return len(self.labels)


class ClickLog(Protocol):
    """A log with random access."""

    num_samples: int

    def read(self, indices: NDArray[np.int64]) -> ClickBatch: ...


def field_keys(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Keys of [samples, fields] values; column f is field f."""
    salts = mix64(np.arange(1, values.shape[1] + 1, dtype=np.uint64))
    return mix64(values ^ salts).view(np.int64)


def text_values(texts: list[bytes]) -> NDArray[np.uint64]:
    """64 bits of each string: its 8-byte words, then its length, hashed one after another."""
    padded = np.array(texts, dtype=np.bytes_)
    width = -(-max(1, padded.dtype.itemsize) // _WORD_BYTES) * _WORD_BYTES
    words = padded.astype(f"S{width}").view("<u8").reshape(len(texts), -1)
    lengths = np.char.str_len(padded).astype(np.int64)
    values = np.zeros(len(texts), dtype=np.uint64)
    for column in range(words.shape[1]):
        # Only words inside the string: the longest string of a chunk must not change the keys of the others.
        inside = lengths > column * _WORD_BYTES
        values = np.where(inside, mix64(values ^ words[:, column]), values)
    return mix64(values ^ (lengths.astype(np.uint64) * _LENGTH_SALT))


def log_scale(numeric: NDArray[np.float32]) -> NDArray[np.float32]:
    """Counts as log(1 + x), negative ones mirrored; a missing one (NaN) is 0."""
    present = np.nan_to_num(numeric, nan=0.0)
    return (np.sign(present) * np.log1p(np.abs(present))).astype(np.float32)
