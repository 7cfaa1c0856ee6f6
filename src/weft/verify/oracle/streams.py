"""A split of the corpus as one stream of tokens, and its rows: inputs, labels and positions, from tokens only.

Row i is tokens [i S, i S + S + 1): S inputs, and each input's label is the token after it. With isolated documents,
the label of a document's end is ignored and positions restart at 0 in every document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
MOST_ROWS, NUM_WINDOWS = 4096, 32  # of an epoch that are checked
Tokens = NDArray[np.int64]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Stream:
    tokens: Tokens
    length: int  # S
    end: int  # of a document
    isolates: bool

    @property
    def num_rows(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def row(self, index: int) -> Tokens:
        """The S + 1 tokens of a row."""
        return self.tokens[index * self.length : (index + 1) * self.length + 1]

    def rows(self, indices: Sequence[int]) -> Tokens:
        return np.stack([self.row(index) for index in indices])

    def batch(self, rows: Tokens) -> dict[str, Tokens]:
        """Inputs, labels and positions for rows of S + 1 tokens."""
        inputs, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        if not self.isolates:
            return {"input_ids": inputs, "labels": labels}
        labels[inputs == self.end] = IGNORED
        positions = np.stack([self._positions(row) for row in inputs])
        return {"input_ids": inputs, "labels": labels, "position_ids": positions}

    def batch_at(self, indices: Sequence[int]) -> dict[str, Tokens]:
        return self.batch(self.rows(indices))

    def hashes_of(self, rows: NDArray[Any]) -> Hashes:
        """One hash per row, for any number of columns up to S + 1."""
        hashes = np.zeros(len(rows), dtype=np.uint64)
        for column, factor in enumerate(_factors(self.length + 1)[: rows.shape[1]]):
            hashes += _scrambled(rows[:, column]) * factor
        return hashes

    @cached_property
    def known(self) -> Hashes:
        """Hashes of all rows with their last label, sorted."""
        last = self.tokens[self.length :: self.length][: self.num_rows]
        return np.unique(self._input_hashes + _scrambled(last) * _factors(self.length + 1)[-1])

    @cached_property
    def counts(self) -> tuple[Hashes, NDArray[np.int64]]:
        """Input hashes of all rows, sorted, with their counts: texts may repeat."""
        unique, counts = np.unique(self._input_hashes, return_counts=True)
        return unique, counts

    def find(self, inputs: NDArray[Any], last_label: int | None = None) -> int | None:
        """The row with these inputs; of several, one with this last label."""
        wanted = self.hashes_of(inputs[None])[0]
        found = np.flatnonzero(self._input_hashes == wanted)
        exact = [index for index in found if self.tokens[(index + 1) * self.length] == last_label]
        return int((exact or [*found])[0]) if len(found) else None

    @cached_property
    def _input_hashes(self) -> Hashes:
        return self.hashes_of(self.tokens[: self.num_rows * self.length].reshape(-1, self.length))

    def _positions(self, inputs: Tokens) -> Tokens:
        positions: list[int] = []
        for before in (self.end, *inputs[:-1].tolist()):
            positions.append(0 if before == self.end else positions[-1] + 1)
        return np.array(positions, dtype=np.int64)


def stream_of(
    stored: NDArray[Any], ranges: Sequence[tuple[int, int]], *, length: int, end: int, isolates: bool
) -> Stream:
    chunks = [stored[begin:stop] for begin, stop in ranges]
    tokens = np.concatenate(chunks).astype(np.int64) if chunks else np.empty(0, dtype=np.int64)
    return Stream(tokens=tokens, length=length, end=end, isolates=isolates)


@cache
def _factors(count: int) -> Hashes:
    return np.random.default_rng(20).integers(1, 2**63, size=count, dtype=np.uint64) | np.uint64(1)


def _scrambled(tokens: NDArray[Any]) -> Hashes:
    words = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed: Hashes = words ^ (words >> np.uint64(29))
    return mixed


def windows(num_rows: int, *, rows: int) -> Iterator[tuple[int, int]]:
    """All samples of a short epoch; evenly spaced windows of a long one, its ends among them.

    Windows are global batches of `rows` as the run reads them: their rows may come in any order."""
    if num_rows <= MOST_ROWS:
        yield 0, num_rows
        return
    width = max(1, MOST_ROWS // NUM_WINDOWS // rows) * rows
    last, end = (num_rows - width) // rows * rows, 0
    for part in range(NUM_WINDOWS - 1):
        begin = max(end, num_rows * part // NUM_WINDOWS // rows * rows)
        end = begin + width
        if end > last:
            break
        yield begin, end
    yield last, num_rows
