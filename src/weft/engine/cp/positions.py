"""The positions of a row that a rank has: taken from whole rows, and put in the order of the row again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from weft.core.sequence_split import SequenceSplit, piece_order, spans_of


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Rows of `length` positions (padded) over `degree` ranks; this one is at `rank`."""

    length: int
    degree: int
    rank: int
    split: SequenceSplit

    @property
    def own_length(self) -> int:
        return self.length // self.degree

    def of_groups(self, size: int) -> Positions:
        """Those of the `size` neighbours that this rank is one of, among such groups: their pieces are neighbours in
        the row, so both splits are those of fewer ranks."""
        return replace(self, degree=self.degree // size, rank=self.rank // size)

    def in_group(self, size: int) -> Positions:
        """This rank's among those of its `size` neighbours, in the order of the row."""
        return replace(self, length=self.own_length * size, degree=size, rank=self.rank % size)

    @cached_property
    def _pieces(self) -> tuple[tuple[int, ...], ...]:
        return piece_order(self.degree, self.split)

    @property
    def spans(self) -> tuple[range, ...]:
        return spans_of(self.length, degree=self.degree, rank=self.rank, split=self.split)

    def index(self, device: torch.device) -> Tensor:
        """The positions of this rank, as a tensor."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans])

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions along `dim`."""
        return torch.cat([whole.narrow(dim, span.start, len(span)) for span in self.spans], dim)

    def in_order(self, by_rank: Sequence[Tensor], dim: int) -> Tensor:
        """Whole rows from the ranks' positions."""
        pieces = {
            piece: part
            for tensor, numbers in zip(by_rank, self._pieces, strict=True)
            for piece, part in zip(numbers, tensor.chunk(len(numbers), dim), strict=True)
        }
        return torch.cat([pieces[number] for number in range(len(pieces))], dim)

    def by_rank(self, whole: Tensor, dim: int) -> Tensor:
        """Whole rows as [rank, …]: the positions of every rank."""
        pieces = whole.chunk(sum(map(len, self._pieces)), dim)
        return torch.stack([torch.cat([pieces[number] for number in numbers], dim) for numbers in self._pieces])
