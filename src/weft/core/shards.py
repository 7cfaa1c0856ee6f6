"""Local shards as chunks: the spans of a global tensor that make up a rank's local tensor. Arithmetic only.

    local[chunk.local_index] == full[chunk.global_index]        for every chunk of a local shard

Tensor parallelism shards a dimension segment by segment (heads of q, of k, of v), so a shard may have several chunks.
Values, norms, checkpoints and comparisons follow from the chunks. Two axes may shard one parameter, experts by their
number and by their width: `compose` makes one shard of both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core import axes

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Span:
    """`size` positions of one dimension from `begin`, held by `copies` of the ranks that shard the dimension."""

    begin: int
    size: int
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A block of the full tensor and its position in the local tensor. `copies` ranks of the sharding axes hold it.

    `summed_over` names the ranks whose gradients of it are partial sums.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]
    copies: int = 1
    summed_over: str | None = None

    @property
    def global_index(self) -> Index:
        return _index(self.offsets, self.sizes)

    @property
    def local_index(self) -> Index:
        return _index(self.local_offsets, self.sizes)

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """A rank's local tensor of one parameter that some axes shard: the full shape, the local shape, and the chunks."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    axis_names: tuple[str, ...] = (axes.TP,)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of the axes hold different shards."""
        return self.local_shape != self.shape

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different shards."""
        return self.axis_names if self.is_sharded else ()

    @property
    def has_full_rows(self) -> bool:
        """Whether no axis shards the last dimension."""
        return self.local_shape[-1:] == self.shape[-1:]

    def with_row_size(self, size: int) -> LocalShard:
        """The same shard of a tensor whose rows have `size` elements; needs full rows."""
        chunks = (replace(chunk, sizes=(*chunk.sizes[:-1], size)) for chunk in self.chunks)
        shape, local_shape = (*self.shape[:-1], size), (*self.local_shape[:-1], size)
        return replace(self, shape=shape, local_shape=local_shape, chunks=tuple(chunks))

    def within(self, index: Index) -> tuple[Chunk, ...]:
        """The chunks inside a slice of the local tensor, relative to that slice: a shard of a shard."""
        kept = (_clip(chunk, index) for chunk in self.chunks)
        return tuple(chunk for chunk in kept if chunk is not None)


def replicated_shard(shape: Sequence[int], *, copies: int, summed_over: str | None = None) -> LocalShard:
    """A parameter that is replicated on the axis."""
    chunk = Chunk(
        offsets=(0,) * len(shape),
        sizes=tuple(shape),
        local_offsets=(0,) * len(shape),
        copies=copies,
        summed_over=summed_over,
    )
    return LocalShard(shape=tuple(shape), local_shape=tuple(shape), chunks=(chunk,))


def local_shard(
    shape: Sequence[int],
    spans: Mapping[int, Sequence[Span]],
    *,
    copies: int = 1,
    summed_over: dict[int, str] | str | None = None,
    axis: str = axes.TP,
) -> LocalShard:
    """The shard with `spans` of some dimensions and all of the others; `copies` ranks hold the same shard.

    `summed_over`: the name for every chunk, or by the number of copies of a span (repeated heads among single ones).
    """
    dims = [list(spans.get(dim, [Span(begin=0, size=size)])) for dim, size in enumerate(shape)]
    placed = [list(zip(of_dim, _starts(of_dim), strict=True)) for of_dim in dims]
    chunks = []
    for chosen in itertools.product(*placed):
        repeats = math.prod(span.copies for span, _ in chosen)
        chunks.append(
            Chunk(
                offsets=tuple(span.begin for span, _ in chosen),
                sizes=tuple(span.size for span, _ in chosen),
                local_offsets=tuple(start for _, start in chosen),
                copies=copies * repeats,
                summed_over=summed_over.get(repeats) if isinstance(summed_over, dict) else summed_over,
            )
        )
    local_shape = tuple(sum(span.size for span in of_dim) for of_dim in dims)
    return LocalShard(shape=tuple(shape), local_shape=local_shape, chunks=tuple(chunks), axis_names=(axis,))


def compose(outer: LocalShard, inner: LocalShard) -> LocalShard:
    """The shard `inner` of the local tensor of `outer`, as chunks of the full tensor."""
    chunks = tuple(
        _within_chunk(chunk, of=part, copies=_copies(outer, chunk) * _copies(inner, part))
        for part in inner.chunks
        for chunk in outer.within(part.global_index)
    )
    return LocalShard(
        shape=outer.shape,
        local_shape=inner.local_shape,
        chunks=chunks,
        axis_names=(*inner.sharded_axes, *outer.sharded_axes),
    )


def even_span(size: int, *, degree: int, place: int) -> Span:
    """Rows in spans of ceil(size / degree): the last ranks may have fewer, or none (a vocabulary)."""
    chunk = -(-size // degree)
    begin = min(place * chunk, size)
    return Span(begin=begin, size=min(chunk, size - begin))


def balanced_span(size: int, *, degree: int, place: int) -> Span:
    """Rows in spans that differ by at most one: no rank is without any if there are enough (7 experts on 4 ranks)."""
    least, more = divmod(size, degree)
    return Span(begin=place * least + min(place, more), size=least + (place < more))


def zero_dim(shape: Sequence[int], *, num_shards: int) -> int:
    """The dimension that ZeRO shards: the first, unless only an inner one divides evenly.

    With 2 experts [2, 8, 4] on 4 ranks, rows would leave two ranks without any. The last dimension is never sharded:
    a block of 8-bit moments lies in it.
    """
    if not shape or shape[0] % num_shards == 0:
        return 0
    return next((dim for dim in range(1, len(shape) - 1) if shape[dim] and shape[dim] % num_shards == 0), 0)


def _copies(shard: LocalShard, chunk: Chunk) -> int:
    """Ranks of the sharding axes that hold a chunk: a replicating axis is none of them."""
    return chunk.copies if shard.is_sharded else 1


def _within_chunk(chunk: Chunk, *, of: Chunk, copies: int) -> Chunk:
    """A chunk relative to the block of `of`, at its place in the local tensor."""
    local_offsets = tuple(start + first for start, first in zip(of.local_offsets, chunk.local_offsets, strict=True))
    return replace(chunk, local_offsets=local_offsets, copies=copies, summed_over=chunk.summed_over or of.summed_over)


def _starts(spans: Sequence[Span]) -> list[int]:
    return list(itertools.accumulate((span.size for span in spans), initial=0))[:-1]


def _clip(chunk: Chunk, index: Index) -> Chunk | None:
    """The block of `chunk` inside a slice of the local tensor."""
    offsets, sizes, local_offsets = [], [], []
    for offset, size, start, inside in zip(chunk.offsets, chunk.sizes, chunk.local_offsets, index, strict=True):
        first, last = max(start, inside.start), min(start + size, inside.stop)
        if last <= first and not (size == 0 and inside.start == 0):
            return None
        offsets.append(offset + first - start)
        sizes.append(max(0, last - first))
        local_offsets.append(first - inside.start)
    return Chunk(
        offsets=tuple(offsets),
        sizes=tuple(sizes),
        local_offsets=tuple(local_offsets),
        copies=chunk.copies,
        summed_over=chunk.summed_over,
    )


def _index(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Index:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
