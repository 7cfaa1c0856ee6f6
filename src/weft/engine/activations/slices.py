"""A rank's slice of a row's activations: what dropout needs to draw the mask of the full tensor and take its own part.

An axis (`Slices`) says which dimensions of a tensor its ranks divide now. Two of them nest (`Nested`): hidden states
are divided over cp, and then over tp; heads over tp, and then over cp (ulysses). From the rank's tensor outwards:

    place   own slice -> full tensor, other values filled        take   full tensor -> own slice
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

HEADS, QUERIES, KEYS = -3, -2, -1  # dimensions of attention weights; queries have heads and positions at the same


class DimSlice(Protocol):
    """A rank's part of a dimension."""

    def full_size(self, own: int) -> int: ...

    def place(self, own: Tensor, dim: int, fill: float) -> Tensor: ...

    def take(self, full: Tensor, dim: int) -> Tensor: ...


Sliced = tuple[int, DimSlice]  # the dimension, and the rank's part of it


class AttentionSlices(NamedTuple):
    """Slices of one attention, from the rank's tensor outwards."""

    heads: tuple[DimSlice, ...] = ()
    queries: tuple[DimSlice, ...] = ()
    keys: tuple[DimSlice, ...] = ()


class Slices(Protocol):
    """Which dimensions of a tensor the ranks of an axis divide, at this point of the forward."""

    @property
    def is_attending(self) -> bool:
        """Whether the ranks of this axis have exchanged what an attention reads, which runs now."""

    def of(self, shape: Sequence[int]) -> Sequence[Sliced]:
        """`shape`: of one row's tensor, [1, …], or of its flattened tokens or heads."""

    def in_attention(self, shape: Sequence[int]) -> AttentionSlices:
        """Of a fused attention; `shape`: of one row's queries."""

    def snapshot(self) -> Slices:
        """Those of this point of the forward, for a backward that repeats from here."""


@dataclass(frozen=True)
class EvenSlice:
    """The slice at `index` of `degree` equal ones."""

    index: int
    degree: int

    def full_size(self, own: int) -> int:
        return own * self.degree

    def place(self, own: Tensor, dim: int, fill: float) -> Tensor:
        size = own.shape[dim]
        full = filled(own, dim, self.full_size(size), fill)
        full.narrow(dim, self.index * size, size).copy_(own)
        return full

    def take(self, full: Tensor, dim: int) -> Tensor:
        size = full.shape[dim] // self.degree
        return full.narrow(dim, self.index * size, size)


@dataclass(frozen=True)
class PositionChunk:
    """`size` positions from `first` on of a rank's `length`. After a gather over ranks a tensor has theirs in turn."""

    first: int
    size: int
    length: int

    def full_size(self, own: int) -> int:
        return own // self.size * self.length

    def place(self, own: Tensor, dim: int, fill: float) -> Tensor:
        full = filled(own, dim, self.full_size(own.shape[dim]), fill)
        for into, part in zip(self._of_ranks(full, dim), torch.split(own, self.size, dim), strict=True):
            into.copy_(part)
        return full

    def take(self, full: Tensor, dim: int) -> Tensor:
        return torch.cat(self._of_ranks(full, dim), dim)

    def _of_ranks(self, full: Tensor, dim: int) -> list[Tensor]:
        return [part.narrow(dim, self.first, self.size) for part in torch.split(full, self.length, dim)]


@dataclass(frozen=True)
class Nested:
    """Slices of several axes: what the last one divides, the one before divides again; in attention the other way."""

    inner_first: tuple[Slices, ...]

    @property
    def is_attending(self) -> bool:
        return any(each.is_attending for each in self.inner_first)

    def of(self, shape: Sequence[int]) -> Sequence[Sliced]:
        found: list[Sliced] = []
        for each in reversed(self.inner_first) if self.is_attending else self.inner_first:
            found += each.of(full_shape(shape, found))
        return found

    def in_attention(self, shape: Sequence[int]) -> AttentionSlices:
        found = [each.in_attention(shape) for each in reversed(self.inner_first)]
        heads, queries, keys = (tuple(one for slices in group for one in slices) for group in zip(*found, strict=True))
        return AttentionSlices(heads, queries, keys)

    def snapshot(self) -> Nested:
        return Nested(tuple(each.snapshot() for each in self.inner_first))


def nested(found: Iterable[Slices | None]) -> Slices | None:
    parts = tuple(each for each in found if each is not None)
    return parts[0] if len(parts) == 1 else Nested(parts) if parts else None


def full_shape(shape: Sequence[int], slices: Sequence[Sliced]) -> tuple[int, ...]:
    sizes = list(shape)
    for dim, each in slices:
        sizes[dim] = each.full_size(sizes[dim])
    return tuple(sizes)


def place(own: Tensor, slices: Sequence[Sliced], *, fill: float = 0.0) -> Tensor:
    for dim, each in slices:
        own = each.place(own, dim, fill)
    return own


def take(full: Tensor, slices: Sequence[Sliced]) -> Tensor:
    for dim, each in reversed(slices):
        full = each.take(full, dim)
    return full


def filled(like: Tensor, dim: int, size: int, fill: float) -> Tensor:
    """A tensor of `fill`, of the shape of `like` but for `size` in dimension `dim`."""
    shape = list(like.shape)
    shape[dim] = size
    return like.new_full(shape, fill)
