"""The indices of a local shard's elements in the full tensor, as rows and columns that a kernel can compute.

    element of (row, column) = first + row * row_step + column

A shard of rows is one row; a matrix sharded by columns has many; several chunks are several spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.core.shards import Chunk, Index


@dataclass(frozen=True, kw_only=True)
class ElementSpan:
    """A block of the local tensor, `rows` x `columns` when flattened."""

    local_index: Index
    rows: int
    columns: int
    first: int
    row_step: int

    def of(self, tensor: Tensor) -> Tensor:
        """That block of a contiguous `tensor`, sharing its memory."""
        return tensor[self.local_index].view(self.rows, self.columns)

    def cut(self, begin: int, end: int) -> ElementSpan:
        """The elements `begin` to `end` of this block, which is all of a local tensor, as a flat tensor of their own.

        Several rows are cut between rows."""
        if self.rows == 1:
            rows, columns, first = 1, end - begin, self.first + begin
        else:
            rows, columns = (end - begin) // self.columns, self.columns
            first = self.first + begin // self.columns * self.row_step
        local_index = (slice(0, end - begin),)
        return ElementSpan(local_index=local_index, rows=rows, columns=columns, first=first, row_step=self.row_step)


def spans_of(chunks: Sequence[Chunk], shape: Sequence[int]) -> list[ElementSpan]:
    """The spans of all chunks of a shard of a tensor of `shape`; empty if the rank holds no element."""
    return [span for chunk in chunks if chunk.num_elements for span in _spans(chunk, tuple(shape))]


def _spans(chunk: Chunk, shape: tuple[int, ...]) -> Iterator[ElementSpan]:
    sharded = [dim for dim, size in enumerate(shape) if chunk.sizes[dim] != size]
    last = sharded[-1] if sharded else 0
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if any(0 < dim < last for dim in sharded):  # a middle dimension too: rows have no common stride, so one by one
        for place in range(chunk.sizes[0]):
            yield from _spans_of_slice(chunk, shape, place)
        return
    yield ElementSpan(
        local_index=chunk.local_index,
        rows=math.prod(chunk.sizes[:last]),
        columns=math.prod(chunk.sizes[last:]),
        first=sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True)),
        row_step=math.prod(shape[last:]),
    )


def _spans_of_slice(chunk: Chunk, shape: tuple[int, ...], place: int) -> Iterator[ElementSpan]:
    """The spans of one slice of the first dimension."""
    inner = Chunk(offsets=chunk.offsets[1:], sizes=chunk.sizes[1:], local_offsets=chunk.local_offsets[1:])
    begin = (chunk.offsets[0] + place) * math.prod(shape[1:])
    row = slice(chunk.local_offsets[0] + place, chunk.local_offsets[0] + place + 1)
    for span in _spans(inner, shape[1:]):
        yield ElementSpan(
            local_index=(row, *span.local_index),
            rows=span.rows,
            columns=span.columns,
            first=begin + span.first,
            row_step=span.row_step,
        )
