"""Parts of tensors as boxes: which runs of a global tensor a rank's own tensor is made of. Arithmetic only.

    local[box.local_index] == whole[box.global_index]        for every box of a part

Tensor parallelism deals a dimension out segment by segment (heads of q, of k, of v), so a part may have several boxes.
Everything that must know who owns what follows from these: values, norms, checkpoints, comparisons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """`size` places of one dimension from `begin`, held by `copies` of the ranks that the dimension is dealt over."""

    begin: int
    size: int
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class Box:
    """A block of the whole tensor and where it lies in the rank's own. `copies` ranks of the axis hold it.

    `summed_over` names the ranks whose gradients of it must be added, where each has only its share of them.
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
class Part:
    """A rank's own tensor of one parameter: the shape of the whole, its own shape, and the boxes between them."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def is_cut(self) -> bool:
        """Whether ranks of the axis hold different parts."""
        return self.local_shape != self.shape

    def within(self, first_row: int, num_rows: int) -> tuple[Box, ...]:
        """The boxes of rows `first_row` and on of the own tensor, local to those rows: a shard of a part."""
        kept = (_clip(box, first_row, first_row + num_rows) for box in self.boxes)
        return tuple(box for box in kept if box is not None)


def replicated_shard(shape: Sequence[int], *, copies: int, summed_over: str | None = None) -> Part:
    """A parameter that every rank of the axis holds whole."""
    box = Box(
        offsets=(0,) * len(shape),
        sizes=tuple(shape),
        local_offsets=(0,) * len(shape),
        copies=copies,
        summed_over=summed_over,
    )
    return Part(shape=tuple(shape), local_shape=tuple(shape), boxes=(box,))


def local_shard(
    shape: Sequence[int],
    runs: Mapping[int, Sequence[Run]],
    *,
    copies: int = 1,
    summed_over: dict[int, str] | str | None = None,
) -> Part:
    """The part made of `runs` of some dimensions and all of the others; `copies` more ranks hold the very same.

    `summed_over`: the name for every box, or by the number of copies a run has (repeated heads among single ones).
    """
    dims = [list(runs.get(dim, [Run(begin=0, size=size)])) for dim, size in enumerate(shape)]
    placed = [list(zip(of_dim, _starts(of_dim), strict=True)) for of_dim in dims]
    boxes = []
    for chosen in itertools.product(*placed):
        repeats = math.prod(run.copies for run, _ in chosen)
        boxes.append(
            Box(
                offsets=tuple(run.begin for run, _ in chosen),
                sizes=tuple(run.size for run, _ in chosen),
                local_offsets=tuple(start for _, start in chosen),
                copies=copies * repeats,
                summed_over=summed_over.get(repeats) if isinstance(summed_over, dict) else summed_over,
            )
        )
    local_shape = tuple(sum(run.size for run in of_dim) for of_dim in dims)
    return Part(shape=tuple(shape), local_shape=local_shape, boxes=tuple(boxes))


def even_span(size: int, *, degree: int, place: int) -> Run:
    """Rows dealt out in runs of ceil(size / degree): the last ranks may have fewer, or none (a vocabulary)."""
    chunk = -(-size // degree)
    begin = min(place * chunk, size)
    return Run(begin=begin, size=min(chunk, size - begin))


def _starts(runs: Sequence[Run]) -> list[int]:
    return list(itertools.accumulate((run.size for run in runs), initial=0))[:-1]


def _clip(box: Box, begin: int, end: int) -> Box | None:
    """The rows of `box` between two rows of the own tensor."""
    first, last = max(box.local_offsets[0], begin), min(box.local_offsets[0] + box.sizes[0], end)
    if last <= first and not (box.sizes[0] == 0 and begin == 0):
        return None
    last = max(first, last)
    return Box(
        offsets=(box.offsets[0] + first - box.local_offsets[0], *box.offsets[1:]),
        sizes=(last - first, *box.sizes[1:]),
        local_offsets=(first - begin, *box.local_offsets[1:]),
        copies=box.copies,
        summed_over=box.summed_over,
    )


def _index(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Index:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))
