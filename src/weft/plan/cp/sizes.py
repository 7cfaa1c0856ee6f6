"""Sizes of context parallelism: heads of a rank, buffers of its attention, the work of its busiest rank."""

from __future__ import annotations

import numpy as np

from weft.core.model_shape import AttentionShape
from weft.plan.columns import CP_ATTENTIONS, CP_SPLITS, Columns, Floats
from weft.plan.view import View

# Seconds of attention, times those of whole rows. Parts of a row are aligned to their last key, which cuDNN's kernel
# does not offer: flash attention took 1.29 times as long with heads of 128, 1.47 with heads of 64; a ring also adds up
# parts in float32, 1.8 with heads of 64 (H200, benchmarks/results/context_step-2026-11-19-h200.md).
WORK = {"gather": 1.35, "ulysses": 1.0, "ring": 1.6}


def kv_heads_of(columns: Columns, attention: AttentionShape) -> Floats:
    """Key-value heads of a tensor-parallel rank, which repeats those that are fewer than ranks."""
    heads = attention.num_kv_heads
    return np.asarray(np.ceil(heads / np.minimum(columns.tp, heads)), dtype=np.float64)


def travelling_kv_heads(columns: Columns, attention: AttentionShape) -> Floats:
    """Key-value heads that a rank sends: repeated until they divide over the ranks that exchange heads."""
    kv = kv_heads_of(columns, attention).astype(np.int64)
    return np.asarray(np.lcm(kv, columns.head_ranks), dtype=np.float64)


def kv_elements(columns: Columns, attention: AttentionShape) -> Floats:
    """Elements of keys and values on a rank, per token of its own: fewer heads have as many more positions."""
    return travelling_kv_heads(columns, attention) * (attention.head_dim + attention.value_dim)


def attention_buffers(view: View, *, wide: Floats) -> Floats:
    """Memory of other ranks' keys and values in one block, with gradients: its backward has most.

    `gather` has those of all ranks, until the block is done. A ring has its own, the next rank's on their way, and the
    gradients of both; with two or three ranks less is on its way. Neither has them beside the tensors of the MLP
    (`wide`): what it has beyond those counts. Key-value heads are repeated for each query head, as transformers does
    beside a mask. An exchange of heads has what is sent and what arrives, before or after the others.
    """
    columns, sizes = view.columns, view.sizes
    gathered = passed = nothing = np.zeros(len(columns))
    for block in view.shape.kinds:
        if block.attention is None:
            continue
        own = view.tokens * sizes.activation * kv_elements(columns, block.attention)
        times = np.maximum(1.0, block.attention.num_heads / columns.tp / travelling_kv_heads(columns, block.attention))
        gathered = np.maximum(gathered, (2 * times) * columns.key_ranks * own)
        exact = 4 / sizes.activation  # sums are in float32
        queries = view.tokens * sizes.activation * block.attention.num_heads / columns.tp * block.attention.head_dim
        on_way = np.where(columns.key_ranks > 2, np.minimum(columns.key_ranks, 4), 1)
        passed = np.maximum(passed, (on_way + 2 * exact + times * (1 + exact)) * own + exact * queries)
    exchanged = np.where(columns.head_ranks > 1, 2 * view.stream_bytes, 0.0)
    of = {"gather": np.maximum(gathered - wide, 0.0), "ring": np.maximum(passed - wide, 0.0), "ulysses": nothing}
    between = np.choose(columns.cp_attention, [of[name] for name in CP_ATTENTIONS])
    return np.where(columns.cp > 1, np.maximum(exchanged, between), 0.0)


def work_of_parts(columns: Columns, attention: AttentionShape) -> Floats:
    """Seconds of attention over those of whole rows. With dropout a rank makes the call of all cp ranks."""
    by_name = np.asarray([WORK[name] for name in CP_ATTENTIONS])
    calls = columns.cp if attention.dropout > 0 else 1
    return np.where(columns.cp > 1, by_name[columns.cp_attention] * calls, 1.0)


def most_work(columns: Columns) -> Floats:
    """Attention of the busiest rank over the mean: contiguous parts are uneven under a causal mask."""
    is_contiguous = columns.cp_split == CP_SPLITS.index("contiguous")
    return np.where(is_contiguous, (2 * columns.key_ranks - 1) / columns.key_ranks, 1.0)
