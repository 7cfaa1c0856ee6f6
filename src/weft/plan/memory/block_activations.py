"""Saved activations of one block in bytes per token of a micro-batch.

Without recompute they are those of the block's profile (`models/shape/profile.py`): tensors that autograd saved in a
forward of the model's own code. For Llama in a compute dtype of c bytes, per token:

| operator               | saves                                                                          |
| ---------------------- | ------------------------------------------------------------------------------ |
| RMSNorm, written out   | the input in float32 (4h), the normalised input (ch), one float32 per vector   |
| linears                | their input, once where several read the same                                  |
| fused attention        | q, k, v, its output, one float32 per head                                      |
| attention with scores  | as above, with k and v repeated for each head, and the probabilities (4 + c) per key |
| act(gate) * up         | gate, act(gate), up; the result is the next linear's input                     |

Sums by sharding over tp (`SavedBytes`): `stream` only with sequence parallel, `gathered` never, `split` always.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.model_shape import AttentionShape, BlockShape, SavedBytes
from weft.plan.columns import TP_MODES, Columns, Floats
from weft.plan.memory.block_tensors import is_inside, is_key_value


def saved_by_default(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations of a block without recompute."""
    nearest = min(
        block.profiles,
        key=lambda one: (one.writes_scores != writes_scores, abs(one.compute_bytes - compute_bytes)),
        default=None,
    )
    saved = nearest.saved if nearest is not None else _saved_by_linears(block, compute_bytes, hidden_size)
    if block.dropout > 0:
        saved = saved + SavedBytes(stream=2.0 * hidden_size)  # two masks of one byte
    return saved


def _saved_by_linears(block: BlockShape, c: int, hidden_size: int) -> SavedBytes:
    """An estimate for blocks that cannot be profiled: inputs and outputs of all linears."""
    total = SavedBytes(stream=float(c * hidden_size))
    for linear in block.linears:
        into, out = (float(c * linear.active * size) for size in (linear.in_features, linear.out_features))
        match linear.style:
            case "column":
                total = total + SavedBytes(gathered=into, split=out)
            case "row":
                total = total + SavedBytes(split=into, gathered=out)
            case _:
                total = total + SavedBytes(gathered=into + out)
    return total


def saved_by_selective(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations under selective recompute: the block's input, outputs of linears and of fused attention.

    Attention with materialised scores is recomputed, so that its scores are not saved.
    """
    c = compute_bytes
    total = SavedBytes(stream=c * hidden_size)
    for linear in block.linears:
        out = float(c * linear.active * linear.out_features)
        if linear.role == "expert":
            total = total + (SavedBytes(split=out) if linear.style == "column" else SavedBytes(routed=out))
        elif linear.style == "column":
            total = total + (SavedBytes(key_value=out) if is_key_value(linear) else SavedBytes(split=out))
        elif linear.style == "row" or is_inside(linear.name, block):
            total = total + SavedBytes(gathered=out)  # partial sums of a row-parallel linear
        else:
            total = total + SavedBytes(stream=out)
    if block.attention is not None and not writes_scores:
        attention = block.attention
        fused = SavedBytes(split=attention.calls * attention.num_heads * (c * attention.value_dim + 4.0))
        total = total + (fused if block.shards("attention") else fused.unsharded)
    return total


def saved_by_compiled(block: BlockShape, *, compute_bytes: int, writes_scores: bool, hidden_size: int) -> SavedBytes:
    """Saved activations of a compiled block: those of selective recompute, with these differences.

    Outputs that are only added to the stream are not saved. Inputs of experts are saved, and rotated queries and keys
    where values are views of a fused output or queries and keys have norms. Materialised scores are saved, with their
    operands and results: keys and values repeated for each head.
    """
    c = compute_bytes
    saved = saved_by_selective(block, compute_bytes=c, writes_scores=writes_scores, hidden_size=hidden_size)
    added = [linear for linear in block.linears if linear.style == "row" and linear.role in _only_added(block)]
    saved = saved - SavedBytes(gathered=float(sum(c * linear.out_features for linear in added)))
    if block.moe is not None:
        saved = saved + SavedBytes(routed=float(c * block.moe.top_k * hidden_size))
    attention = block.attention
    if attention is None:
        return saved
    if _saves_fused_output(block) or any(norm.place in ("query", "key") for norm in block.norms):
        rotated = _rotated(attention, c)
        saved = saved + (rotated if block.shards("attention") else rotated.unsharded)
    if not writes_scores:
        return saved
    repeated = attention.num_heads - attention.num_kv_heads
    around = attention.num_heads * attention.value_dim + repeated * (attention.head_dim + attention.value_dim)
    scores = SavedBytes(scores=float(c * attention.num_heads), split=float(c * around))
    return saved + (scores if block.shards("attention") else scores.unsharded)


def saved_by_full(*, compute_bytes: int, hidden_size: int) -> SavedBytes:
    """Saved activations under full recompute: the block's input."""
    return SavedBytes(stream=float(compute_bytes * hidden_size))


@dataclass(frozen=True)
class WideStream:
    """What a residual stream in float32 adds: to the numbers that norms save, and to the block's input."""

    norms: SavedBytes
    input: SavedBytes


def wide_stream(block: BlockShape, *, more_bytes: int, hidden_size: int) -> WideStream:
    """`more_bytes`: of an element of the stream than of other activations. A norm saves what it scales in float32; of
    four norms of the stream's size two read the outputs of attention and MLP."""
    reads = min(2, sum(norm.place == "residual" for norm in block.norms))
    size = float(more_bytes * hidden_size)
    return WideStream(norms=SavedBytes(stream=reads * size), input=SavedBytes(stream=size))


def bytes_of(saved: SavedBytes, block: BlockShape, columns: Columns, *, tokens: Floats, keys: Floats) -> Floats:
    """Bytes on a rank whose micro-batch has `tokens` tokens that see up to `keys` keys."""
    tp = columns.tp.astype(np.float64)
    shards_all = columns.tp_mode != TP_MODES.index("1d")  # grids shard every activation
    stream_divisor = np.where((columns.sequence_parallel > 0) | shards_all, tp, 1.0)
    gathered_divisor = np.where(shards_all, tp, 1.0)
    heads = block.attention.num_kv_heads if block.attention else 1
    key_value_divisor = np.minimum(tp, heads)
    per_token = (
        saved.stream / stream_divisor
        + saved.gathered / gathered_divisor
        + saved.split / tp
        + saved.key_value / key_value_divisor
        + saved.scores * keys / tp
        + saved.unsharded_scores * keys / gathered_divisor
        + saved.routed * columns.expert_tp / tp  # ranks with full experts have the group's tokens once
        + saved.copied * ((columns.sequence_parallel > 0) & (tp > 1) & ~shards_all)
    )
    return np.asarray(tokens * per_token, dtype=np.float64)


def _rotated(attention: AttentionShape, c: int) -> SavedBytes:
    """Rotated queries and keys."""
    return SavedBytes(
        split=float(c * attention.num_heads * attention.head_dim),
        key_value=float(c * attention.num_kv_heads * attention.head_dim),
    )


def _only_added(block: BlockShape) -> tuple[str, ...]:
    """Roles whose last matmul is added to the stream unchanged and is read by nothing else in the block."""
    if block.saves_after_exit:
        return ()
    return ("attention", "mlp") if block.is_parallel else ("mlp",)


def _saves_fused_output(block: BlockShape) -> bool:
    names = {linear.name.rpartition(".")[2] for linear in block.linears if linear.role == "attention"}
    is_fused = bool(names & {"qkv_proj", "query_key_value", "Wqkv", "W_pack"})
    return is_fused and block.attention is not None and block.attention.rotary


def mean_keys(attention: AttentionShape, sequence_length: float) -> float:
    """Mean number of keys per query under a causal mask and a sliding window."""
    if attention.window is None or attention.window >= sequence_length:
        return (sequence_length + 1) / 2
    window = attention.window
    return (window * (window + 1) / 2 + (sequence_length - window) * window) / sequence_length
