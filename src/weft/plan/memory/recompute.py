"""Recomputed blocks of a pipeline rank, for every plan: all, none, or by the mixture of a budget.

`none`, `selective` and `full` treat all blocks alike. The blocks of a budget follow the rule in core/mixture: a rank
holds ranges of blocks, and the number recomputed in a range is a difference of two closed forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.core.mixture import counts_before
from weft.plan.columns import Bools, Columns, Floats, Ints

BlockRange = tuple[int, int]  # half-open, of the model's blocks


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """Recomputed blocks of a rank; one row per plan."""

    columns: Columns
    num_blocks: int  # of the model
    ranges: list[tuple[BlockRange, ...]]  # blocks on the rank, for each distinct pipeline
    held: Floats  # blocks on the rank
    full: Floats  # [plans, kinds]: number of fully recomputed blocks
    selective: Floats

    @staticmethod
    def of(
        columns: Columns, blocks: Floats, *, order: Sequence[int], ranges: list[tuple[BlockRange, ...]]
    ) -> Recomputed:
        """`blocks`: [plans, kinds] on the rank; `order`: the kind of each block of the model."""
        full = blocks * columns.recomputes("full")[:, None]
        selective = blocks * columns.recomputes("selective")[:, None]
        found = Recomputed(
            columns=columns,
            num_blocks=len(order),
            ranges=ranges,
            held=np.asarray(blocks.sum(axis=1)),
            full=full,
            selective=selective,
        )
        for rows, held in found._mixed():
            for kind, begin, end in _of_one_kind(order, held):
                fully, partly = found._between(rows, begin, end)
                full[rows, kind] += fully
                selective[rows, kind] += partly
        return found

    @property
    def is_mixed(self) -> Bools:
        return self.columns.recomputes("budget")

    @property
    def num_full(self) -> Floats:
        return np.asarray(self.full.sum(axis=1))

    @property
    def num_selective(self) -> Floats:
        return np.asarray(self.selective.sum(axis=1))

    def finished(self, done: Floats) -> tuple[Floats, Floats]:
        """(fully, selectively) recomputed blocks among the last `done` of the rank, the first in the backward."""
        full = done * self.columns.recomputes("full")
        selective = done * self.columns.recomputes("selective")
        for rows, held in self._mixed():
            left = sum(end - begin for begin, end in held) - done[rows].astype(np.int64)
            for begin, end in held:
                size = end - begin
                fully, partly = self._between(rows, begin + np.clip(left, 0, size), end)
                full[rows] += fully
                selective[rows] += partly
                left = left - size
        return full, selective

    def above_last(self, way: Literal["full", "selective"]) -> Floats:
        """Number of blocks after the last one that is recomputed this way; 0 if there is none."""
        index = 0 if way == "full" else 1
        found = np.zeros(len(self.columns))
        is_above = self.is_mixed & ((self.num_full, self.num_selective)[index] > 0)
        while np.any(is_above):
            is_above = is_above & (self.finished(found + 1)[index] == 0)
            found[is_above] += 1
        return found

    def _mixed(self) -> list[tuple[Ints, tuple[BlockRange, ...]]]:
        """Plans with a mixture, grouped by the block ranges of the rank."""
        if not np.any(self.is_mixed):
            return []
        which = self.columns.pipelines[1]
        groups = [(np.flatnonzero(self.is_mixed & (which == index)), held) for index, held in enumerate(self.ranges)]
        return [(rows, held) for rows, held in groups if len(rows)]

    def _between(self, rows: Ints, begin: Ints | int, end: int) -> tuple[Ints, Ints]:
        full, selective = self.columns.full_blocks[rows], self.columns.selective_blocks[rows]
        before, after = (
            counts_before(block, num_blocks=self.num_blocks, full=full, selective=selective) for block in (begin, end)
        )
        return after[0] - before[0], after[1] - before[1]


def _of_one_kind(order: Sequence[int], held: tuple[BlockRange, ...]) -> list[tuple[int, int, int]]:
    """(kind, begin, end) of runs of blocks of one kind."""
    found: list[tuple[int, int, int]] = []
    for begin, end in held:
        first = begin
        for block in range(begin + 1, end + 1):
            if block == end or order[block] != order[first]:
                found.append((order[first], first, block))
                first = block
    return found
