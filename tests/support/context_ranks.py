"""What context-parallel ranks (and tensor-parallel ones among them) draw for their slices, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.sequence_split import SequenceSplit, padded_length
from weft.engine.activations.dropout import seeded_forward
from weft.engine.activations.slices import EvenSlice, nested
from weft.engine.cp.positions import Positions
from weft.engine.cp.slices import Attending, ContextSlices
from weft.engine.tp.activation_layout import ActivationLayout, Layout

ROWS = 3
Function = Callable[[Tensor], Tensor]


def of_one_process(function: Function, x: Tensor) -> Tensor:
    with seeded_forward(seed=5, step=2, first_row=4, num_rows=ROWS, is_random=True):
        return function(x)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank of cp, and of tp."""

    length: int
    cp: int
    cp_rank: int
    split: SequenceSplit
    tp: int = 1
    tp_rank: int = 0
    layout: Layout = "full"
    attending: Attending = field(default_factory=Attending)

    @property
    def positions(self) -> Positions:
        padded = padded_length(self.length, degree=self.cp, split=self.split, multiple=self.tp)
        return Positions(length=padded, degree=self.cp, rank=self.cp_rank, split=self.split)

    @property
    def slices(self) -> ContextSlices:
        return ContextSlices(self.positions, self.length, self.attending)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        place = {"place": self.tp_rank, "degree": self.tp, "sequence_parallel": self.layout == "stream"}
        tensor = ActivationLayout(**place, now=self.layout) if self.tp > 1 else None
        slices = nested([tensor, self.slices])
        with seeded_forward(seed=5, step=2, first_row=4, num_rows=ROWS, is_random=True, slices=slices):
            yield

    def padded(self, whole: Tensor, dim: int, fill: float = 0.0) -> Tensor:
        shape = list(whole.shape)
        shape[dim] = self.positions.length - self.length
        return torch.cat([whole, whole.new_full(shape, fill)], dim)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's positions of cp."""
        return self.positions.take(self.padded(whole, dim), dim)

    def own_of_tp(self, whole: Tensor, dim: int) -> Tensor:
        return EvenSlice(self.tp_rank, self.tp).take(whole, dim) if self.tp > 1 else whole

    def real(self, own: Tensor, dim: int) -> Tensor:
        """Without positions that are padding, in the order of the rank."""
        index = self.positions.index(own.device)
        return own.index_select(dim, (index < self.length).nonzero().flatten())


@dataclass(frozen=True, kw_only=True)
class Attention:
    """[rows, heads, positions, width]; `mask`: of whole rows, None is causal."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    rate: float = 0.4

    def of_one_process(self) -> Tensor:
        with seeded_forward(seed=5, step=2, first_row=4, num_rows=ROWS, is_random=True):
            return self._attend(self.query, self.key, self.value, self.mask)

    def gathered(self, rank: Rank) -> tuple[Tensor, Tensor]:
        """Of the rank's queries: found, and expected."""
        query, key, value = (rank.own_of_tp(each, 1) for each in (self.query, self.key, self.value))
        mask = self.mask
        if mask is not None:
            mask = rank.own(rank.padded(mask, 3), 2)
        with rank.drawing(), rank.attending.by("gather"):
            found = self._attend(rank.own(query, 2), rank.padded(key, 2, 7.0), rank.padded(value, 2, 7.0), mask)
        expected = rank.own(rank.own_of_tp(self.of_one_process(), 1), 2)
        return rank.real(found, 2), rank.real(expected, 2)

    def over_heads(self, rank: Rank) -> tuple[Tensor, Tensor]:
        """Of the rank's heads: found, and expected."""

        def own(whole: Tensor, fill: float) -> Tensor:
            return rank.padded(EvenSlice(rank.cp_rank, rank.cp).take(rank.own_of_tp(whole, 1), 1), 2, fill)

        mask = rank.padded(rank.padded(self.mask, 3), 2) if self.mask is not None else None
        with rank.drawing(), rank.attending.by("ulysses"):
            found = self._attend(own(self.query, 0.0), own(self.key, 7.0), own(self.value, 7.0), mask)
        return found.narrow(2, 0, rank.length), own(self.of_one_process(), 0.0).narrow(2, 0, rank.length)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, self.rate, is_causal=mask is None)


@dataclass(frozen=True, kw_only=True)
class EagerAttention(Attention):
    """The scores exist, and their softmax is dropped. `mask` is needed."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        scores = (query @ key.mT).masked_fill(~mask, torch.finfo(query.dtype).min)
        weights: Tensor = F.dropout(scores.softmax(-1), self.rate)
        return weights @ value
