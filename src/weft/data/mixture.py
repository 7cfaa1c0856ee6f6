"""Mixtures: rows of several sources, drawn by weight. The source of a sample is a function of (seed, sample) alone.

Samples come in blocks of BLOCK. In each, source s has n_s places, its weight to 1 / BLOCK, spread evenly with a random
shift inside of each place: any stretch of samples has the sources in their shares, to a sample or two. Sample number k
of source s is its row permute(k mod rows, epoch = k div rows): each source has epochs of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from weft.data.order import mix64, permute
from weft.data.rows import Batch, RowLayout, RowTable, SampleRows, open_rows
from weft.data.split import Split

BLOCK = 1 << 16
_MASK_64 = (1 << 64) - 1


@dataclass(frozen=True)
class MixedSource:
    """One source of a mixture."""

    name: str
    split: Split
    layout: RowLayout
    weight: float


@dataclass(frozen=True)
class Mixture:
    """Several sources in place of one split."""

    sources: tuple[MixedSource, ...]
    by_tokens: bool  # weights are shares of tokens, not of samples

    @property
    def num_documents(self) -> int:
        return sum(source.split.num_documents for source in self.sources)

    @property
    def num_tokens(self) -> int:
        return sum(source.split.num_tokens for source in self.sources)


class MixedRows:
    """The rows of all sources, one source after the other."""

    per_sample = 1

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.tables: list[RowTable] = [open_rows(source.split, source.layout) for source in mixture.sources]
        self.sizes = [table.num_rows for table in self.tables]
        self._first = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.num_rows = int(self._first[-1])
        self.length = self.tables[0].length
        self.has_positions = any(table.has_positions for table in self.tables)

    @cached_property
    def shares(self) -> list[float]:
        """The share of each source in the samples."""
        weights = [source.weight for source in self.mixture.sources]
        if self.mixture.by_tokens:
            weights = [weight / _tokens_per_row(table) for weight, table in zip(weights, self.tables, strict=True)]
        return [weight / sum(weights) for weight in weights]

    @cached_property
    def interleaved(self) -> NDArray[np.int64]:
        """All rows once, those of every source spread evenly: the order of an evaluation."""
        times = np.concatenate([(np.arange(size) + 0.5) / size for size in self.sizes])
        return np.argsort(times, kind="stable")

    def order(self, *, seed: int) -> MixtureOrder:
        return MixtureOrder(self.shares, self.sizes, seed=seed)

    def work(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        owners = self._owners(rows)
        work = np.empty_like(rows)
        for owner in np.unique(owners).tolist():
            chosen = owners == owner
            work[chosen] = self.tables[owner].work(rows[chosen] - self._first[owner])
        return work

    def _owners(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The source of each row."""
        return np.searchsorted(self._first, rows, side="right") - 1

    def read(self, rows: NDArray[np.int64]) -> Batch:
        owners = self._owners(rows)
        read = [
            self.tables[owner].read(np.array([row - self._first[owner]]))
            for owner, row in zip(owners, rows, strict=True)
        ]
        if self.has_positions:  # of the mixture, not of these rows: every rank has the same fields
            for batch in read:  # a row without them is one document
                batch.setdefault("position_ids", np.arange(batch["input_ids"].shape[1])[None])
        return {key: np.concatenate([batch[key] for batch in read]) for key in read[0]}


class MixtureOrder:
    """Rows of samples; pure and with random access."""

    def __init__(self, shares: Sequence[float], sizes: Sequence[int], *, seed: int) -> None:
        self.places = block_places(shares)
        self._sizes = np.array(sizes, dtype=np.int64)
        self._first = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._seed = seed
        self._block = lru_cache(maxsize=4)(self._make_block)

    def rows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        owners, numbers = self.draws(samples)
        rows = np.empty_like(samples)
        for owner in np.unique(owners).tolist():
            chosen = owners == owner
            epochs, indices = np.divmod(numbers[chosen], self._sizes[owner])
            seed = self._seed + ((owner + 1) << 64)
            permuted = permute(indices, size=int(self._sizes[owner]), seed=seed, epoch=epochs)
            rows[chosen] = self._first[owner] + permuted
        return rows

    def draws(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample, and its number among the samples of that source."""
        owners, numbers = np.empty_like(samples), np.empty_like(samples)
        for at, sample in enumerate(samples.tolist()):
            block, place = divmod(sample, BLOCK)
            of_block, ranks = self._block(block)
            owners[at] = of_block[place]
            numbers[at] = block * self.places[of_block[place]] + ranks[place]
        return owners, numbers

    def epochs(self, samples: int) -> list[float]:
        """How often each source was seen after so many samples."""
        block, place = divmod(samples, BLOCK)
        counts = block * self.places + np.bincount(self._block(block)[0][:place], minlength=len(self.places))
        return [float(value) for value in counts / self._sizes]

    def _make_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each place of a block: the source, and its number among the places of that source."""
        owners = np.repeat(np.arange(len(self.places)), self.places)
        ranks = np.concatenate([np.arange(count) for count in self.places])
        keys = mix64(np.array([self._seed & _MASK_64, block], dtype=np.uint64))
        shifts = mix64(
            owners.astype(np.uint64) << np.uint64(32) | ranks.astype(np.uint64) ^ (keys[0] ^ mix64(keys[1:]))
        )
        times = (ranks + shifts / 2.0**64) / self.places[owners]
        order = np.argsort(times, kind="stable")
        owners = owners[order]
        ranks = np.empty_like(owners)
        for owner, count in enumerate(self.places.tolist()):
            ranks[owners == owner] = np.arange(count)
        return owners, ranks


def block_places(shares: Sequence[float]) -> NDArray[np.int64]:
    """The places of each source in a block: shares rounded to a sum of BLOCK, at least one each."""
    exact = np.array(shares, dtype=np.float64) * BLOCK
    places = np.maximum(np.floor(exact), 1).astype(np.int64)
    places[int(places.argmax())] += min(0, BLOCK - int(places.sum()))
    rest = np.argsort(-(exact - places), kind="stable")
    for index in range(BLOCK - int(places.sum())):
        places[rest[index % len(rest)]] += 1
    return places


def _tokens_per_row(table: RowTable) -> float:
    """Mean tokens of a row, without padding."""
    if isinstance(table, SampleRows):
        pieces = table.pieces
        return max(1.0, float((pieces.ends - pieces.begins - 1).sum()) / max(1, table.num_rows))
    return float(table.length)
