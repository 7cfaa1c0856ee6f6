"""Loader: a split as batches of rows, each a pure function of (position, seed), for any number of ranks.

Its only state is `position`, the number of samples that the run has consumed.
Sample p of the run is row permute(p mod rows, epoch = p div rows); a rank takes its contiguous share of the batch,
whose rows `balance` may order by their attention work. What is in a row: `rows`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.errors import BatchError, DataError
from weft.data.balance import balanced_order
from weft.data.mixture import MixedRows, Mixture
from weft.data.order import permute
from weft.data.rows import IGNORED, RowLayout, RowTable, open_rows, require_rows
from weft.data.split import Split


class Loader:
    """Batches of one rank. With `epochs` the data ends; otherwise it repeats, each time in a new order."""

    def __init__(
        self,
        split: Split | Mixture,
        *,
        seed: int,
        global_batch: int,
        layout: RowLayout,  # of a split; the sources of a mixture have their own
        dp_rank: int = 0,
        dp_degree: int = 1,
        epochs: int | None = None,
        shuffle: bool = True,
        balances: bool = False,
    ) -> None:
        require_share(global_batch, dp_rank=dp_rank, dp_degree=dp_degree)
        self.split = split
        self.seed = seed
        self.global_batch = global_batch
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.shuffle = shuffle
        self.balances = balances
        self.rows = _rows_of(split, layout)
        self._mixed = self.rows.order(seed=seed) if isinstance(self.rows, MixedRows) and shuffle else None
        self.num_rows = self.rows.num_rows
        self.total_samples = None if epochs is None else epochs * self.num_rows
        self.columns: dict[str, NDArray[np.float64]] = {}  # by name: numbers [rows, per_sample] that batches carry

    def has_batch(self, position: int) -> bool:
        """Whether a batch that starts at this sample is not empty; equal on every rank."""
        return position >= 0 and (self.total_samples is None or position < self.total_samples)

    def epochs(self, position: int) -> dict[str, float]:
        """How often each source of a mixture was seen after so many samples; of other data, the data itself."""
        if self._mixed is None or not isinstance(self.split, Mixture):
            return {"data": position / self.num_rows}
        names = [source.name for source in self.split.sources]
        return dict(zip(names, self._mixed.epochs(position), strict=True))

    def state(self, _position: int) -> dict[str, Any] | None:
        """What a resume needs besides the position: nothing."""
        return None

    def restore(self, state: dict[str, Any] | None) -> None:
        """Continue at a state."""

    def batch(self, position: int) -> dict[str, torch.Tensor]:
        """This rank's rows of the global batch that begins at sample `position`."""
        if not self.has_batch(position):
            raise IndexError(f"there is no batch at sample {position} of {self.total_samples}")
        share = self.global_batch // self.dp_degree
        samples = self.samples(position)[self.dp_rank * share : (self.dp_rank + 1) * share]
        rows, filler = self._rows(samples)
        batch: dict[str, NDArray[Any]] = dict(self.rows.read(rows))
        batch["labels"][np.repeat(filler, self.rows.per_sample)] = IGNORED
        for name, values in self.columns.items():
            batch[name] = self._column(name, values, rows, filler)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def samples(self, position: int) -> NDArray[np.int64]:
        """The samples of the global batch that begins at `position`, in the order of its rows."""
        samples = position + np.arange(self.global_batch, dtype=np.int64)
        if not self.balances or not self._is_of_one_epoch(position):
            return samples
        return samples[balanced_order(self.rows.work(self.rows_of(samples)))]

    def _is_of_one_epoch(self, position: int) -> bool:
        """Whether the batch is full, and its rows are of one epoch; sources of a mixture have epochs of their own.

        Rows of two epochs in one order would put a row of the second before the last ones of the first."""
        last = position + self.global_batch - 1
        if self.total_samples is not None and last >= self.total_samples:
            return False
        return self._mixed is not None or position // self.num_rows == last // self.num_rows

    def _column(
        self, name: str, values: NDArray[np.float64], rows: NDArray[np.int64], filler: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        found = np.where(filler[:, None], np.float64(0), values[rows])
        if np.isnan(found).any():
            raise DataError(
                f"{name} of row {int(rows[np.isnan(found).any(axis=1)][0])} was not computed before the first step",
                hint="a resume with another train.global_batch reads other samples: keep it, or start a new run",
            )
        return found.reshape(-1)

    def whole_batch(self, position: int) -> dict[str, torch.Tensor]:
        """The rows of all ranks, for inspection."""
        alone = copy.copy(self)
        alone.dp_rank, alone.dp_degree = 0, 1
        return alone.batch(position)

    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each sample."""
        return self._rows(samples)[0]

    def _rows(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The row of each sample, and a mask of padding samples beyond the end."""
        filler = np.zeros(samples.shape, dtype=bool)
        if self.total_samples is not None:
            filler = samples >= self.total_samples
            samples = np.where(filler, 0, samples)
        if self._mixed is not None:
            return self._mixed.rows(samples), filler
        epochs, indices = np.divmod(samples, self.num_rows)
        if isinstance(self.rows, MixedRows):
            return self.rows.interleaved[indices], filler
        if self.shuffle:
            indices = permute(indices, size=self.num_rows, seed=self.seed, epoch=epochs)
        return indices, filler


def _rows_of(data: Split | Mixture, layout: RowLayout) -> RowTable:
    """The rows; each source must have some."""
    if isinstance(data, Split):
        rows = open_rows(data, layout)
        require_rows(rows, data, sequence_length=layout.sequence_length)
        return rows
    mixed = MixedRows(data)
    for source, table in zip(data.sources, mixed.tables, strict=True):
        require_rows(table, source.split, sequence_length=source.layout.sequence_length)
    return mixed


def require_share(global_batch: int, *, dp_rank: int, dp_degree: int) -> None:
    """Raise if the rank has no equal share of the batch."""
    if not 0 <= dp_rank < dp_degree:
        raise ValueError(f"dp_rank {dp_rank} is not in [0, {dp_degree})")
    below = global_batch // dp_degree * dp_degree
    if below == global_batch and global_batch > 0:
        return
    nearest = f"{below} or {below + dp_degree}" if below > 0 else f"{below + dp_degree}"
    raise BatchError(
        f"a global batch of {global_batch} does not divide over {dp_degree} data-parallel ranks",
        hint=f"set train.global_batch to {nearest}",
    )
