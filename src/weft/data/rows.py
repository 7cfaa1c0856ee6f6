"""Rows of a split: inputs, labels and positions of any of them, by number. Orders and ranks are the loader's.

    StreamRows    packing = "concatenate": row i is tokens [i S, i S + S + 1) of the stream of all documents
    SampleRows    a row is one sample or several whole ones, each n tokens in n - 1 positions, then padding

Labels are already shifted; -100 where there is no loss: padding, and tokens that do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.core.data_spec import DataSpec, Packing, Truncation
from weft.core.errors import DataError
from weft.data.balance import work_of
from weft.data.packing import pack
from weft.data.split import Split
from weft.data.words import Words, counted_of, tokens_of

IGNORED = -100  # the ignore_index of torch's cross entropy

Batch = dict[str, NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How samples become rows: the keys of [data] that say it."""

    sequence_length: int
    packing: Packing = "concatenate"
    truncation: Truncation = "split"
    isolate_documents: bool = False
    is_paired: bool = False

    @staticmethod
    def of(data: DataSpec) -> RowLayout:
        return RowLayout(
            sequence_length=data.sequence_length,
            packing=data.row_packing,
            truncation=data.row_truncation,
            isolate_documents=data.isolate_documents,
            is_paired=data.format == "preference",
        )


class RowTable(Protocol):
    @property
    def num_rows(self) -> int: ...

    @property
    def length(self) -> int:
        """Positions of a row."""
        ...

    @property
    def per_sample(self) -> int:
        """Rows of a batch for each row number: 2 for pairs."""
        ...

    @property
    def has_positions(self) -> bool:
        """Whether rows have `position_ids`."""
        ...

    def read(self, rows: NDArray[np.int64]) -> Batch: ...

    def work(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Attention work of each row; padding behind isolated documents is a document."""
        ...


def open_rows(split: Split, layout: RowLayout) -> RowTable:
    """The rows of a split; there may be none."""
    if layout.packing == "concatenate":
        return StreamRows(split, layout.sequence_length, isolates=layout.isolate_documents)
    pieces = cut(split, layout)
    if layout.is_paired:
        return PairRows(split, pieces, layout.sequence_length)
    lengths = np.maximum(pieces.ends - pieces.begins - 1, 0)
    packed = layout.packing == "documents"
    rows = pack(lengths, room=layout.sequence_length) if packed else [[index] for index in range(len(lengths))]
    return SampleRows(split, pieces, layout.sequence_length, rows=rows, has_positions=packed)


class StreamRows:
    """Rows of the stream of all documents. The last incomplete one is dropped."""

    per_sample = 1

    def __init__(self, split: Split, length: int, *, isolates: bool) -> None:
        self.split = split
        self.length = length
        self.has_positions = isolates
        self.num_rows = split.num_rows(length)

    def read(self, rows: NDArray[np.int64]) -> Batch:
        words = self.split.read(rows * self.length, length=self.length + 1)
        inputs, labels = _inputs_and_labels(words, self.split)
        batch = {"input_ids": inputs, "labels": labels}
        if self.has_positions:
            end = self.split.end_of_document
            labels[inputs == end] = IGNORED
            batch["position_ids"] = document_positions(inputs, end_of_document=end)
        return batch

    def work(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.has_positions:
            return np.full(rows.shape, self.length**2, dtype=np.int64)
        begins = rows * self.length
        first = np.searchsorted(self._ends, begins, side="right")
        last = np.searchsorted(self._ends, begins + self.length, side="left")
        borders = zip(begins.tolist(), first.tolist(), last.tolist(), strict=True)
        lengths = (np.diff([begin, *self._ends[a:b], begin + self.length]) for begin, a, b in borders)
        return np.array([work_of(each) for each in lengths], dtype=np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The place in the stream behind each document."""
        return np.cumsum(self.split.bounds[:, 1] - self.split.bounds[:, 0])


@dataclass(frozen=True)
class Pieces:
    """What is left of each sample after truncation: ranges of stored tokens, and what was done."""

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    num_samples: int
    num_long: int  # samples that do not fit into a row
    num_dropped: int  # too long, too short, or without a token that counts once truncated


class SampleRows:
    """Rows of whole pieces."""

    per_sample = 1

    def __init__(
        self, split: Split, pieces: Pieces, length: int, *, rows: list[list[int]], has_positions: bool
    ) -> None:
        self.split = split
        self.pieces = pieces
        self.length = length
        self.has_positions = has_positions
        self.num_rows = len(rows)
        self._first = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
        self._members = np.array([index for row in rows for index in row], dtype=np.int64)

    def read(self, rows: NDArray[np.int64]) -> Batch:
        return self.read_pieces([self._members[self._first[row] : self._first[row + 1]] for row in rows.tolist()])

    def work(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.has_positions:
            return np.full(rows.shape, self.length**2, dtype=np.int64)
        return self._work[rows]

    @cached_property
    def _work(self) -> NDArray[np.int64]:
        """Of every row."""
        lengths = (self.pieces.ends - self.pieces.begins - 1)[self._members]
        padding = self.length - np.add.reduceat(lengths, self._first[:-1])
        return np.asarray(np.add.reduceat(lengths**2, self._first[:-1]) + padding**2, dtype=np.int64)

    def read_pieces(self, rows: list[NDArray[np.int64]]) -> Batch:
        shape = (len(rows), self.length)
        batch = {
            "input_ids": np.full(shape, self.split.end_of_document, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
        }
        positions = np.zeros(shape, dtype=np.int64)
        for row, members in enumerate(rows):
            at = 0
            for piece in members.tolist():
                words = self.split.tokens[self.pieces.begins[piece] : self.pieces.ends[piece]]
                end = at + len(words) - 1
                batch["input_ids"][row, at:end], batch["labels"][row, at:end] = _inputs_and_labels(words, self.split)
                positions[row, at:end] = np.arange(end - at)
                at = end
            positions[row, at:] = np.arange(self.length - at)  # padding attends to itself
        return {**batch, "position_ids": positions} if self.has_positions else batch


class PairRows(SampleRows):
    """Pairs: rows 2 k and 2 k + 1 of a batch are the chosen and the rejected answer of its pair k."""

    per_sample = 2

    def __init__(self, split: Split, pieces: Pieces, length: int) -> None:
        rows = [[index, index + 1] for index in range(0, len(pieces.begins), 2)]
        super().__init__(split, pieces, length, rows=rows, has_positions=False)

    def read(self, rows: NDArray[np.int64]) -> Batch:
        both = [self._members[2 * row + side] for row in rows.tolist() for side in (0, 1)]
        return self.read_pieces([np.array([index]) for index in both])


def cut(split: Split, layout: RowLayout) -> Pieces:
    """The pieces of all samples. A piece has at most S + 1 tokens: S inputs, each with the next token as its label."""
    begins, ends = split.bounds[:, 0], split.bounds[:, 1]
    lengths, most = ends - begins, layout.sequence_length + 1
    is_long = lengths > most
    if layout.truncation == "split":
        starts, stops = _split(begins, ends, step=layout.sequence_length)
    else:
        starts = np.where(is_long & (layout.truncation == "start"), ends - most, begins)
        stops = np.where(is_long & (layout.truncation == "end"), begins + most, ends)
    kept = stops - starts > 1
    if layout.truncation in ("drop", "error"):
        kept &= ~is_long
    if split.has_mask:
        changed = np.flatnonzero(kept & ((stops - starts < lengths) if len(starts) == len(lengths) else True))
        for index in changed.tolist():
            kept[index] = counted_of(split.tokens[starts[index] + 1 : stops[index]], split.tokens.dtype).any()
    if layout.is_paired:
        kept = np.repeat(kept.reshape(-1, 2).all(axis=1), 2)
    dropped = int((~kept).sum())
    return Pieces(starts[kept], stops[kept], len(lengths), int(is_long.sum()), dropped)


def has_pieces(split: Split, layout: RowLayout) -> bool:
    return len(cut(split, layout).begins) > 0


def _split(begins: NDArray[np.int64], ends: NDArray[np.int64], *, step: int) -> tuple[Any, Any]:
    """Pieces of `step` inputs each; the first label of a piece follows the last one of the piece before."""
    counts = np.maximum(1, -(-(ends - begins - 1) // step))
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + numbers * step
    return starts, np.minimum(starts + step + 1, np.repeat(ends, counts))


def document_positions(inputs: NDArray[np.int64], *, end_of_document: int) -> NDArray[np.int64]:
    """Positions [rows, S]: from 0 in every row, restarting after each end of a document."""
    columns = np.arange(inputs.shape[1], dtype=np.int64)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_document, columns[1:], 0)
    return columns - np.maximum.accumulate(begins, axis=1)


def require_rows(rows: RowTable, split: Split, *, sequence_length: int) -> None:
    """Raise if there is no row to train on."""
    if rows.num_rows > 0:
        return
    if isinstance(rows, SampleRows):
        raise DataError(
            f"no sample is left of {rows.pieces.num_samples}: {rows.pieces.num_long} are longer than a row of"
            f" data.sequence_length = {sequence_length}",
            hint="raise data.sequence_length, or change data.truncation",
        )
    raise DataError(
        f"the split has {split.num_tokens} tokens in {split.num_documents} documents, "
        f"but one row of sequence_length {sequence_length} needs {sequence_length + 1}",
        hint="give more data, lower data.sequence_length, or change data.eval_fraction",
    )


def _inputs_and_labels(words: Words, split: Split) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs, and the token after each as its label if it counts."""
    if not split.has_mask:
        tokens = words.astype(np.int64)
        return tokens[..., :-1].copy(), tokens[..., 1:].copy()
    dtype = split.tokens.dtype
    tokens = tokens_of(words, dtype)
    return tokens[..., :-1].copy(), np.where(counted_of(words, dtype), tokens, IGNORED)[..., 1:].copy()
