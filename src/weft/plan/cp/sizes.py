"""Sizes of context parallelism: heads of a rank, buffers of its attention, the work of its busiest rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.core.model_shape import AttentionShape, ModelShape
from weft.plan.columns import CP_ATTENTIONS, CP_SPLITS, Columns, Floats, Ints
from weft.plan.view import View


def kv_heads_of(columns: Columns, attention: AttentionShape) -> Floats:
    """Key-value heads of a tensor-parallel rank, which repeats those that are fewer than ranks."""
    heads = attention.num_kv_heads
    return np.asarray(np.ceil(heads / np.minimum(columns.tp, heads)), dtype=np.float64)


def kv_elements(columns: Columns, attention: AttentionShape) -> Floats:
    """Elements of a token's keys and values on a rank."""
    return kv_heads_of(columns, attention) * (attention.head_dim + attention.value_dim)


def exchanged_kv_heads(columns: Columns, attention: AttentionShape) -> Floats:
    """Key-value heads that ulysses sends: repeated until they divide over the ranks."""
    kv = kv_heads_of(columns, attention).astype(np.int64)
    return np.asarray(np.lcm(kv, columns.cp), dtype=np.float64)


def attention_buffers(view: View) -> Floats:
    """Memory of the keys and values of all ranks in one block, with their gradients: its backward has most.

    Key-value heads are repeated for each query head, as transformers does beside a mask.
    """
    columns, most = view.columns, np.zeros(len(view.columns))
    for block in view.shape.kinds:
        if block.attention is None:
            continue
        whole = columns.cp * view.tokens * view.sizes.activation * kv_elements(columns, block.attention)
        times = np.maximum(1.0, block.attention.num_heads / columns.tp / kv_heads_of(columns, block.attention))
        most = np.maximum(most, (2 * times) * whole)
    gathers = columns.cp_attention == CP_ATTENTIONS.index("gather")
    return np.where(columns.cp > 1, np.where(gathers, most, 2 * view.stream_bytes), 0.0)


def most_work(columns: Columns) -> Floats:
    """Attention of the busiest rank over the mean: contiguous parts are uneven under a causal mask."""
    is_uneven = (columns.cp_split == CP_SPLITS.index("contiguous")) & (
        columns.cp_attention != CP_ATTENTIONS.index("ulysses")
    )
    return np.where((columns.cp > 1) & is_uneven, (2 * columns.cp - 1) / columns.cp, 1.0)


def chosen_attentions(shape: ModelShape, cp: Ints, tp: Ints, fixed: Mapping[str, object]) -> Ints:
    """The fixed attention, or for each plan the one that sends fewer bytes: ulysses where heads divide."""
    key, gather, ulysses = "context_parallel.attention", *map(CP_ATTENTIONS.index, ("gather", "ulysses"))
    if key in fixed:
        return np.full(len(cp), CP_ATTENTIONS.index(str(fixed[key])), dtype=np.int64)
    found = [block.attention for block in shape.kinds if block.attention is not None]
    if not found:
        return np.full(len(cp), gather, dtype=np.int64)
    largest = max(found, key=lambda each: each.num_heads)
    heads = largest.num_heads // np.maximum(tp, 1)
    kv = np.maximum(1, largest.num_kv_heads // np.maximum(tp, 1))
    by_heads = 2 * (heads + np.lcm(kv, cp)) / np.maximum(cp, 1)
    does_divide = np.all([each.num_heads % (cp * tp) == 0 for each in found], axis=0)
    return np.where(does_divide & (by_heads < 3 * kv), ulysses, gather)
