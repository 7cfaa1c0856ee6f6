"""Loader: a split as batches of rows, each a pure function of (position, seed), for any number of ranks.

Its only state is `position`, the number of samples that the run has consumed.
Row i of the stream is tokens [i * S, i * S + S + 1): the first S are inputs, the last S the labels, already shifted.
Sample p of the run is row permute(p mod rows, epoch = p div rows); a rank takes its contiguous share of the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import BatchError, DataError
from weft.data.order import permute
from weft.data.split import Split

IGNORED = -100  # the ignore_index of torch's cross entropy


class Loader:
    """Batches of one rank. With `epochs` the data ends; otherwise it repeats, each time in a new order."""

    def __init__(
        self,
        split: Split,
        *,
        seed: int,
        global_batch: int,
        sequence_length: int,
        dp_rank: int = 0,
        dp_degree: int = 1,
        isolate_documents: bool = False,
        epochs: int | None = None,
        shuffle: bool = True,
    ) -> None:
        _require_divisible(global_batch, dp_degree=dp_degree)
        if not 0 <= dp_rank < dp_degree:
            raise ValueError(f"dp_rank {dp_rank} is not in [0, {dp_degree})")
        self.split = split
        self.seed = seed
        self.global_batch = global_batch
        self.sequence_length = sequence_length
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.isolate_documents = isolate_documents
        self.shuffle = shuffle
        self.num_rows = _require_rows(split, sequence_length=sequence_length)
        self.total_samples = None if epochs is None else epochs * self.num_rows

    def has_batch(self, position: int) -> bool:
        """Whether a batch that starts at this sample is not empty; equal on every rank."""
        return position >= 0 and (self.total_samples is None or position < self.total_samples)

    def batch(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's rows of the global batch that begins at sample `position`."""
        if not self.has_batch(position):
            raise IndexError(f"there is no batch at sample {position} of {self.total_samples}")
        share = self.global_batch // self.dp_degree
        samples = position + self.dp_rank * share + np.arange(share, dtype=np.int64)
        rows, filler = self._rows(samples)
        tokens = self.split.read(rows * self.sequence_length, length=self.sequence_length + 1)
        inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        labels[filler] = IGNORED
        batch = {"input_ids": inputs, "labels": labels}
        if self.isolate_documents:
            labels[inputs == self.split.end_of_document] = IGNORED
            batch["position_ids"] = document_positions(inputs, end_of_document=self.split.end_of_document)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The row of each sample, and a mask of padding samples beyond the end."""
        filler = np.zeros(samples.shape, dtype=bool)
        if self.total_samples is not None:
            filler = samples >= self.total_samples
            samples = np.where(filler, 0, samples)
        epochs, indices = np.divmod(samples, self.num_rows)
        if self.shuffle:
            indices = permute(indices, size=self.num_rows, seed=self.seed, epoch=epochs)
        return indices, filler


def document_positions(inputs: NDArray[np.int64], *, end_of_document: int) -> NDArray[np.int64]:
    """Positions [rows, S]: from 0 in every row, restarting after each end of a document."""
    columns = np.arange(inputs.shape[1], dtype=np.int64)
    begins = np.zeros_like(inputs)
    begins[:, 1:] = np.where(inputs[:, :-1] == end_of_document, columns[1:], 0)
    return columns - np.maximum.accumulate(begins, axis=1)


def _require_divisible(global_batch: int, *, dp_degree: int) -> None:
    below = global_batch // dp_degree * dp_degree
    if below == global_batch and global_batch > 0:
        return
    nearest = f"{below} or {below + dp_degree}" if below > 0 else f"{below + dp_degree}"
    raise BatchError(
        f"a global batch of {global_batch} does not divide over {dp_degree} data-parallel ranks",
        hint=f"set train.global_batch to {nearest}",
    )


def _require_rows(split: Split, *, sequence_length: int) -> int:
    num_rows = split.num_rows(sequence_length)
    if num_rows < 1:
        raise DataError(
            f"the split has {split.num_tokens} tokens in {split.num_documents} documents, "
            f"but one row of sequence_length {sequence_length} needs {sequence_length + 1}",
            hint="give more data, lower data.sequence_length, or change data.eval_fraction",
        )
    return num_rows
