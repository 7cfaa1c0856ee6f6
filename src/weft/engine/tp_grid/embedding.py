"""Embeddings sharded by vocabulary and by features on a grid. Ids and outputs have a rank's local rows.

| mode     | rows of the vocabulary          | features | ids are gathered, outputs reduce-scattered over |
| -------- | ------------------------------- | -------- | ----------------------------------------------- |
| 2d, 2.5d | chunk i of q                    | chunk j  | "i"                                             |
| 3d       | chunk j q + i of q^2            | chunk k  | "ij"                                            |

Chunks are those of `core.shards.even_span`: the last may be smaller, or empty. The same table serves the head
(`summa.head`, `cube.head`), so tied weights stay one tensor. A position embedding, [positions, features chunk], is a
plain lookup.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.core.shards import Span, even_span
from weft.engine.collectives import gathered, scatter
from weft.engine.tp.grid import Grid


def table_group(grid: Grid) -> dist.ProcessGroup:
    """The ranks with the other tokens of the same features."""
    return grid.group("ij" if grid.mode == "3d" else "i")


def table_span(grid: Grid, vocabulary: int) -> Span:
    """The tokens of this rank's table."""
    if grid.mode == "3d":
        side = grid.sizes["i"]
        return even_span(vocabulary, degree=side**2, place=grid.place["j"] * side + grid.place["i"])
    return even_span(vocabulary, degree=grid.sizes["i"], place=grid.place["i"])


def logits_span(grid: Grid, vocabulary: int) -> Span:
    """The tokens of this rank's logits: chunk j, in 3d q chunks of the table."""
    side, place = grid.sizes["j"], grid.place["j"]
    if grid.mode != "3d":
        return even_span(vocabulary, degree=side, place=place)
    begin, end = (even_span(vocabulary, degree=side**2, place=at * side).begin for at in (place, place + 1))
    return Span(begin=begin, size=end - begin)


def token_table(ids: Tensor, table: Tensor, *, grid: Grid, vocabulary: int, padding_idx: int | None = None) -> Tensor:
    """Rows of the full table for this rank's ids, with its features alone."""
    group = table_group(grid)
    span = table_span(grid, vocabulary)
    all_ids = gathered(ids, group, 0)
    own_padding = None if padding_idx is None else padding_idx - span.begin
    found = _rows_here(all_ids - span.begin, table, padding_idx=own_padding)
    if dist.get_rank(group) == 0:
        # An id outside of the vocabulary would read as zeros: NaN makes it visible.
        found = found.masked_fill(((all_ids < 0) | (all_ids >= vocabulary)).unsqueeze(-1), torch.nan)
    return scatter(found, group, 0)


def _rows_here(places: Tensor, table: Tensor, *, padding_idx: int | None) -> Tensor:
    """Rows of the local table, zeros for ids of other ranks."""
    size = table.shape[0]
    if size == 0:  # still a graph: the empty table's gradient must be empty, not missing
        return table.sum() + table.new_zeros((*places.shape, table.shape[-1]))
    is_here = (places >= 0) & (places < size)
    if padding_idx is not None and not 0 <= padding_idx < size:
        padding_idx = None
    found = F.embedding(places.clamp(0, size - 1), table, padding_idx=padding_idx)
    return found.masked_fill(~is_here.unsqueeze(-1), 0.0)
