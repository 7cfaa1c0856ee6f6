"""The attention that a plan gets by default: the one whose exchanges cost the least time, by sizes.

Heads are exchanged among n neighbouring ranks, keys and values travel between c = cp / n of them. With the bytes of a
token's keys and values k, queries q and outputs o, and the seconds of its attention:

| exchange | seconds per token                                                     |
| -------- | --------------------------------------------------------------------- |
| heads    | 2 (n - 1) / n (q + k + o) / bandwidth of the neighbours               |
| gather   | 3 (c - 1) k / bandwidth: nothing hides them; the work on parts of rows |
| ring     | 3 (c - 1) k that attention does not hide, and the work on its parts   |

`gather` and `ring` have n = 1 or the most neighbours of a node whose number divides cp and heads; `ulysses` has n = cp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from weft.core import axes
from weft.core.model_shape import AttentionShape, BlockShape
from weft.plan.columns import CP_ATTENTIONS, Columns, Floats, Ints
from weft.plan.cp.sizes import WORK, kv_elements, work_of_parts
from weft.plan.request import Request, byte_sizes
from weft.plan.time.compute import ATTENTION_BACKWARD, attention_seconds
from weft.plan.time.links import context_links, inner_degree
from weft.plan.time.transfers import OVERLAP

_ATTENTION, _ULYSSES = "context_parallel.attention", "context_parallel.ulysses"


def with_attentions(request: Request, columns: Columns, fixed: Mapping[str, object]) -> Columns:
    """Plans with the fixed attention, or the fastest. What writes its scores may have caps that no ring adds up, and
    attention with dropout runs in no ring and in no groups.

    Groups are chosen with the attention: a fixed one is what it says.
    """
    found = [block.attention for block in request.shape.kinds if block.attention is not None]
    names = [str(fixed[_ATTENTION])] if _ATTENTION in fixed else [*CP_ATTENTIONS]
    if not found:
        return _with(columns, names[0], columns.cp_ulysses)
    drops = any(each.dropout > 0 for each in found)
    if _ATTENTION not in fixed and (drops or any(each.materialises_scores for each in found)):
        names.remove("ring")
    given = drops or bool({_ATTENTION, _ULYSSES} & fixed.keys())
    sizes = [columns.cp_ulysses] if given else [np.ones_like(columns.cp), _most_neighbours(request, columns, found)]
    ways = [_with(columns, name, size) for size in sizes for name in names]
    best = np.argmin([_seconds(request, way, found) for way in ways], axis=0)
    return replace(
        columns,
        cp_attention=np.choose(best, [way.cp_attention for way in ways]),
        cp_ulysses=np.choose(best, [way.cp_ulysses for way in ways]),
    )


def _with(columns: Columns, attention: str, ulysses: Ints) -> Columns:
    return replace(columns, cp_attention=np.full(len(columns), CP_ATTENTIONS.index(attention)), cp_ulysses=ulysses)


def _most_neighbours(request: Request, columns: Columns, found: list[AttentionShape]) -> Ints:
    """The largest groups within a node whose ranks divide cp and the heads; 1 if there are none."""
    most, (stride, _) = np.ones_like(columns.cp), inner_degree(columns, (axes.CP,))
    for size in range(2, request.cluster.devices_per_node + 1):
        divides = (columns.cp % size == 0) & (size < columns.cp) & (size * stride <= request.cluster.devices_per_node)
        most = np.where(divides & _heads_divide(columns, found, np.full_like(most, size)), size, most)
    return most


def _heads_divide(columns: Columns, found: list[AttentionShape], size: Ints) -> Ints:
    return np.all([each.num_heads % (size * columns.tp) == 0 for each in found], axis=0)


def _seconds(request: Request, columns: Columns, found: list[AttentionShape]) -> Floats:
    """Of the exchanges and the work on parts, per token; infinite where heads or groups do not divide."""
    kinds = [block for block in request.shape.kinds if block.attention is not None]
    largest, block = max(zip(found, kinds, strict=True), key=lambda each: each[0].num_heads)
    near, far = context_links(request.cluster, columns)
    n, c = columns.head_ranks, columns.key_ranks
    kept = byte_sizes(request).activation * largest.calls
    keys = kept * kv_elements(columns, largest)
    queries = kept * largest.num_heads / columns.tp * (largest.head_dim + largest.value_dim)
    heads = near.exchange_seconds(2 * (n - 1) / n * (queries + keys), num_calls=0)
    work = _work(request, columns, block)
    parts = np.where(c > 1, work_of_parts(columns, largest) - 1, 0.0) * work
    moved = 3 * (c - 1) * keys
    hidden = OVERLAP * WORK["ring"] * work * (c - 1) / c
    passed = np.maximum(far.hop_seconds(moved, num_calls=0) - hidden, 0.0)
    is_ring = columns.cp_attention == CP_ATTENTIONS.index("ring")
    between = np.where(is_ring, passed, far.seconds(moved, num_calls=0))
    divides = _heads_divide(columns, found, n) & ((columns.cp_ulysses == 1) | (c > 1))
    return np.where((n == 1) | divides, heads + between + parts, np.inf)


def _work(request: Request, columns: Columns, block: BlockShape) -> Floats:
    """Seconds of a token's attention over whole rows."""
    assert block.attention is not None
    token, parts = np.ones(len(columns)), work_of_parts(columns, block.attention)
    return (1 + ATTENTION_BACKWARD) * attention_seconds(request, columns, block, token) / parts
