"""Split: some documents of a token store read as one stream; and the choice of held-out documents.

Nothing is copied: a split is a list of runs of consecutive documents in the mapped tokens. Stream position p lies in
run r with stream_starts[r] <= p < stream_starts[r + 1], at token run_starts[r] + p - stream_starts[r].
A document is held out if its hashed index is below the fraction: no seed, and a larger fraction only adds documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.data.byte_tokenizer import TokenArray
from weft.data.order import mix64

# Makes the hold-out hash independent of the one that orders rows.
_SALT = np.uint64(0x68656C642D6F7574)


@dataclass(frozen=True)
class Split:
    """A stream of documents, each ended by `end_of_document`."""

    tokens: TokenArray
    run_starts: NDArray[np.int64]
    stream_starts: NDArray[np.int64]
    num_documents: int
    vocab_size: int
    end_of_document: int
    has_mask: bool = False  # tokens are words of samples
    offsets: NDArray[np.int64] | None = None  # of all documents of the store
    runs: NDArray[np.int64] | None = None  # [runs, 2]: first document, and the one after the last

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """[documents, 2]: begin and end of each document in `tokens`."""
        if self.offsets is None or self.runs is None:
            raise ValueError("this split does not know its documents")
        indices = np.concatenate([np.empty(0, dtype=np.int64), *(np.arange(*run) for run in self.runs.tolist())])
        return np.stack([self.offsets[indices], self.offsets[indices + 1]], axis=1).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self.stream_starts[-1])

    def num_rows(self, sequence_length: int) -> int:
        """Number of rows of `sequence_length` inputs; the last row needs one more token, as its last label."""
        return max(0, (self.num_tokens - 1) // sequence_length)

    def read(self, starts: NDArray[np.int64], *, length: int) -> NDArray[np.int64]:
        """The tokens [start, start + length) of the stream for every start: [len(starts), length]."""
        rows = np.empty((len(starts), length), dtype=np.int64)
        runs = np.searchsorted(self.stream_starts, starts, side="right") - 1
        for row, start, run in zip(rows, starts.tolist(), runs.tolist(), strict=True):
            self._copy(row, start=start, run=run)
        return rows

    def _copy(self, row: NDArray[np.int64], *, start: int, run: int) -> None:
        done = 0
        while done < len(row):
            count = min(len(row) - done, int(self.stream_starts[run + 1]) - start)
            first = int(self.run_starts[run]) + start - int(self.stream_starts[run])
            row[done : done + count] = self.tokens[first : first + count]
            done, start, run = done + count, start + count, run + 1


def held_out_documents(num_documents: int, *, fraction: float) -> NDArray[np.int64]:
    """Sorted indices of the held-out documents: about `fraction` of them, at least one, never all."""
    if fraction <= 0 or num_documents < 2:
        return np.empty(0, dtype=np.int64)
    scores = mix64(np.arange(num_documents, dtype=np.uint64) ^ _SALT)
    chosen = np.flatnonzero(scores < np.uint64(int(fraction * 2**64)))
    if len(chosen) == 0:
        chosen = np.array([np.argmin(scores)])
    elif len(chosen) == num_documents:
        chosen = np.delete(chosen, np.argmax(scores))
    return chosen.astype(np.int64)


def split_documents(
    tokens: TokenArray,
    offsets: NDArray[np.int64],
    *,
    eval_fraction: float,
    vocab_size: int,
    end_of_document: int,
    has_mask: bool = False,
    together: int = 1,
) -> tuple[Split, Split | None]:
    """(training, evaluation); document d is tokens[offsets[d]:offsets[d + 1]], its end token included.

    `together`: documents that are held out together, as the two of a pair."""
    all_offsets, offsets = offsets, offsets[::together]

    def build(first: NDArray[np.int64], last: NDArray[np.int64]) -> Split:
        kept = last > first
        first, last = first[kept], last[kept]
        lengths = offsets[last] - offsets[first]
        return Split(
            tokens=tokens,
            run_starts=np.asarray(offsets[first], dtype=np.int64),
            stream_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            num_documents=int((last - first).sum()) * together,
            vocab_size=vocab_size,
            end_of_document=end_of_document,
            has_mask=has_mask,
            offsets=all_offsets,
            runs=np.stack([first, last], axis=1) * together,
        )

    num_documents = len(offsets) - 1
    held_out = held_out_documents(num_documents, fraction=eval_fraction)
    training = build(np.concatenate([[0], held_out + 1]), np.concatenate([held_out, [num_documents]]))
    return training, build(held_out, held_out + 1) if len(held_out) else None
