"""Sizes of context parallelism: heads of a rank, buffers of its attention, the work of its busiest rank."""

from __future__ import annotations

import numpy as np

from weft.core.model_shape import AttentionShape
from weft.plan.columns import CP_ATTENTIONS, CP_SPLITS, Bools, Columns, Floats
from weft.plan.view import View

# Seconds of attention, times those of whole rows. Parts of a row are aligned to their last key, which cuDNN's kernel
# does not offer: flash attention took 1.29 times as long with heads of 128, 1.47 with heads of 64; a ring also adds up
# parts in float32, 1.8 with heads of 64 (H200, benchmarks/results/context_step-2026-11-19-h200.md).
WORK = {"gather": 1.35, "ulysses": 1.0, "ring": 1.6}


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


def attention_buffers(view: View, *, wide: Floats) -> Floats:
    """Memory of other ranks' keys and values in one block, with gradients: its backward has most.

    `gather` has those of all ranks, until the block is done. A ring has its own, the next rank's on their way, and the
    gradients of both. Neither has them beside the tensors of the MLP (`wide`): what it has beyond those counts.
    Key-value heads are repeated for each query head, as transformers does beside a mask.
    """
    columns, sizes = view.columns, view.sizes
    gathered, passed = np.zeros(len(columns)), np.zeros(len(columns))
    for block in view.shape.kinds:
        if block.attention is None:
            continue
        own = view.tokens * sizes.activation * kv_elements(columns, block.attention)
        times = np.maximum(1.0, block.attention.num_heads / columns.tp / kv_heads_of(columns, block.attention))
        gathered = np.maximum(gathered, (2 * times) * columns.cp * own)
        exact = 4 / sizes.activation  # sums are in float32
        queries = view.tokens * sizes.activation * block.attention.num_heads / columns.tp * block.attention.head_dim
        passed = np.maximum(passed, (4 + 2 * exact + times * (1 + exact)) * own + exact * queries)
    beyond = {"gather": np.maximum(gathered - wide, 0.0), "ring": np.maximum(passed - wide, 0.0)}
    of = {**beyond, "ulysses": 2 * view.stream_bytes}
    return np.where(columns.cp > 1, np.choose(columns.cp_attention, [of[name] for name in CP_ATTENTIONS]), 0.0)


def is_ring(columns: Columns) -> Bools:
    return np.asarray((columns.cp > 1) & (columns.cp_attention == CP_ATTENTIONS.index("ring")))


def work_of_parts(columns: Columns, attention: AttentionShape) -> Floats:
    """Seconds of attention over those of whole rows. With dropout a rank makes the call of all cp ranks."""
    by_name = np.asarray([WORK[name] for name in CP_ATTENTIONS])
    calls = columns.cp if attention.dropout > 0 else 1
    return np.where(columns.cp > 1, by_name[columns.cp_attention] * calls, 1.0)


def most_work(columns: Columns) -> Floats:
    """Attention of the busiest rank over the mean: contiguous parts are uneven under a causal mask."""
    is_uneven = (columns.cp_split == CP_SPLITS.index("contiguous")) & (
        columns.cp_attention != CP_ATTENTIONS.index("ulysses")
    )
    return np.where((columns.cp > 1) & is_uneven, (2 * columns.cp - 1) / columns.cp, 1.0)
