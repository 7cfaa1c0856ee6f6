"""How a context-parallel rank's activations lie in whole rows: dropout draws their masks and takes its own.

    outside of attention    own positions, in dimension 1 of [rows, positions, …], or flattened: [rows x positions, …]
    "gather"                queries: own positions; keys: whole rows
    "ulysses"               a share of the heads; queries and keys: whole rows

Masks have the length of the row without padding, so a row that is padded draws those of one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import NotBuiltError
from weft.engine.activations.slices import (
    HEADS,
    KEYS,
    QUERIES,
    AttentionSlices,
    EvenSlice,
    Sliced,
    filled,
)
from weft.engine.cp.positions import Positions


@dataclass
class Attending:
    """The attention whose own function runs now; "" outside of it."""

    now: str = ""

    @contextmanager
    def by(self, attention: str) -> Iterator[None]:
        before, self.now = self.now, attention
        try:
            yield
        finally:  # also when recompute stops in the middle
            self.now = before


@dataclass(frozen=True)
class WholePositions:
    """All positions, with padding."""

    positions: Positions
    length: int  # of the row, without padding

    def full_size(self, own: int) -> int:
        _require(own, self.positions.length)
        return self.length

    def place(self, own: Tensor, dim: int, fill: float) -> Tensor:
        return own.narrow(dim, 0, self.length)

    def take(self, full: Tensor, dim: int) -> Tensor:
        if self.length == self.positions.length:
            return full
        return torch.cat([full, filled(full, dim, self.positions.length - self.length, 0.0)], dim)


@dataclass(frozen=True)
class OwnPositions:
    """The positions of this rank, some of which may be padding."""

    whole: WholePositions

    def full_size(self, own: int) -> int:
        _require(own, self.whole.positions.own_length)
        return self.whole.length

    def place(self, own: Tensor, dim: int, fill: float) -> Tensor:
        positions = self.whole.positions
        padded, begin = filled(own, dim, positions.length, fill), 0
        for span in positions.spans:
            padded.narrow(dim, span.start, len(span)).copy_(own.narrow(dim, begin, len(span)))
            begin += len(span)
        return self.whole.place(padded, dim, fill)

    def take(self, full: Tensor, dim: int) -> Tensor:
        return self.whole.positions.take(self.whole.take(full, dim), dim)


class ContextSlices:
    """Of the rows of one micro-batch."""

    def __init__(self, positions: Positions, length: int, attending: Attending) -> None:
        self._positions, self._attending = positions, attending
        self._whole = WholePositions(positions, length)
        self._own = OwnPositions(self._whole)

    @property
    def is_attending(self) -> bool:
        return self._attending.now != ""

    def of(self, shape: Sequence[int]) -> Sequence[Sliced]:
        if not self.is_attending:
            return [(self._dim(shape), self._own)]
        if len(shape) != 4:
            raise _refused(shape)
        heads, queries, keys = self.in_attention(shape)
        dims = ((4 + HEADS, heads), (4 + QUERIES, queries), (4 + KEYS, keys))
        return [(dim, each) for dim, parts in dims for each in parts]

    def in_attention(self, shape: Sequence[int]) -> AttentionSlices:
        if self._attending.now == "gather":
            return AttentionSlices(queries=(self._own,), keys=(self._whole,))
        if self._attending.now == "ulysses":
            share = EvenSlice(self._positions.rank, self._positions.degree)
            return AttentionSlices(heads=(share,), queries=(self._whole,), keys=(self._whole,))
        raise NotBuiltError(
            "attention dropout outside of the attention interface of transformers, with context parallelism"
            " (mesh.cp > 1)",
            hint="set the model's attention dropout to 0 in [model.config], or use mesh.cp = 1",
        )

    def snapshot(self) -> ContextSlices:
        return self  # what repeats an attention says so again

    def _dim(self, shape: Sequence[int]) -> int:
        """The dimension of positions in the tensor of one row."""
        own = self._positions.own_length
        if shape[0] == own and (own > 1 or len(shape) == 2):
            return 0
        found = [dim for dim in range(1, max(2, len(shape) - 1)) if shape[dim] == own] if shape[0] == 1 else []
        if len(found) != 1:
            raise _refused(shape)
        return found[0]


def _require(found: int, expected: int) -> None:
    if found != expected:
        raise _refused((found,))


def _refused(shape: Sequence[int]) -> NotBuiltError:
    return NotBuiltError(
        f"dropout on a tensor of shape {tuple(shape)} per row cannot be assigned to positions of the row, with context"
        " parallelism (mesh.cp > 1)",
        hint="set the model's dropout to 0 in [model.config], or use mesh.cp = 1",
    )
