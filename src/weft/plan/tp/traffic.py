"""Traffic of one-dimensional tensor parallelism per step, as in the engine, for every plan.

Per micro-batch of t tokens with hidden size h, for each region (attention, an MLP, experts, shared experts):

| where                | without sequence parallel    | with it                                            |
| -------------------- | ---------------------------- | -------------------------------------------------- |
| a region's entry     | backward all_reduce [t, h]   | forward all_gather [t, h], backward reduce_scatter |
| a region's exit      | forward all_reduce [t, h]    | forward reduce_scatter [t, h], backward all_gather |
| entry of experts     | backward all_reduce [t, k]   | the same for choices (int64) and weights [t, k]    |
| experts, folded ep   | forward all_gather [s, h], backward of [s, h], [s, k] |                           |
| norm over shards     | all_reduce [t] both ways     | the same                                           |
| replicated attention |                              | forward all_gather [t, h], backward reduce_scatter |
| first and last block |                              | all_gather [t, h] forward (last), backward (first) |
| token table          | forward all_reduce [t, h]    | the same                                           |
| head                 | backward all_reduce [t, h]   | the same                                           |
| loss                 | forward all_reduce [t], [2, t] float32; or all_gather of logits | the same        |
| … fused              | forward all_reduce [t], [2, t] float32, per chunk               | the same        |
| partitioned input    | backward all_gather [t, h] of each fully recomputed block       | not needed      |

With folded expert parallelism tensor ranks hold full experts, which have no entry and no exit: a rank dispatches its
slice of the sequence, or else its share of s tokens: t, padded to a multiple of tp.
Recompute, full or selective, repeats the collectives of a block's forward in the backward, except the last exit if
nothing after it is saved (no norm, no dropout, no gate): recompute stops at the last saved tensor.
Float8 adds those of scales (`float8.py`).
Once per step: all_reduce of partial gradients (see block_tensors.py), in the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weft.core import axes
from weft.core.model_shape import BlockShape
from weft.plan.axis import SMALL_ELEMENTS, TrafficRow
from weft.plan.columns import TP_MODES, Bools, Floats
from weft.plan.memory.block_tensors import is_wide, trained_tensors_of
from weft.plan.memory.fused_loss import num_chunks
from weft.plan.time.links import gather_bytes, reduce_bytes
from weft.plan.tp.float8 import scale_collectives
from weft.plan.view import View

FLOAT32_BYTES = 4
INDEX_BYTES = 8
ALONE_ELEMENTS = 2**22  # larger gradients are reduced alone, the others together

Sent = tuple[str, str, Floats, Floats]  # collective, phase, bytes, count
Passed = tuple[str, Floats, float]  # collective, bytes, count


@dataclass(frozen=True, kw_only=True)
class BlockCollectives:
    """Collectives of one block over the tensor axis."""

    regions: int
    weights: int  # of the router that enter regions
    choices: int
    statistics_forward: int  # all-reduces of one element per token
    statistics_backward: int
    numbers_backward: int  # elements per token in the latter
    replicated_mixers: int
    last_exits: int  # exits that recompute does not reach
    shares: int = 0  # experts that get a share of the tokens of a rank, without sequence parallel
    last_shares: int = 0  # of their outputs, those that recompute does not reach


def collectives_of(block: BlockShape, *, is_folded: bool = False) -> BlockCollectives:
    """Collectives of one block of this kind. `is_folded`: expert parallelism divides experts over tensor ranks."""
    is_divided = is_folded and block.moe is not None
    are_last = is_divided and not block.saves_after_experts
    rows = [
        linear
        for linear in block.linears
        if linear.style == "row" and linear.active and not (is_divided and linear.role == "expert")
    ]
    wide = [norm for norm in block.norms if is_wide(norm, block)]
    # a fused layer norm reduces mean and variance separately, and their gradients together
    centred = sum(norm.kind == "layer" for norm in wide)
    routed = block.moe if any(linear.role == "expert" for linear in rows) else None
    return BlockCollectives(
        regions=len(rows),
        weights=routed.num_weights if routed is not None else 0,
        choices=routed.num_choices if routed is not None else 0,
        statistics_forward=len(wide) + centred,
        statistics_backward=len(wide),
        numbers_backward=len(wide) + centred,
        replicated_mixers=_replicated_mixers(block),
        last_exits=0 if _saves_after_sum(block) or are_last else min(1, len(rows)),
        shares=int(is_divided),
        last_shares=int(are_last),
    )


def _replicated_mixers(block: BlockShape) -> int:
    """Number of replicated mixers: attention that is not sharded, and a state-space mixer."""
    mixing = [linear for linear in block.linears if linear.role in ("attention", "other") and linear.active]
    if block.attention is None:
        return int(bool(mixing))
    has_replicated_attention = not block.shards("attention") and any(linear.role == "attention" for linear in mixing)
    return int(has_replicated_attention) + int(any(linear.role == "other" for linear in mixing))


def _saves_after_sum(block: BlockShape) -> bool:
    """Whether a tensor is saved after the last exit: of a norm, dropout, a gate of shared experts, a replicated MLP."""
    feeds = [linear for linear in block.linears if linear.role in ("mlp", "expert", "shared_expert")]
    has_replicated_mlp = any(linear.style == "replicated" and linear.active for linear in feeds)
    return block.saves_after_exit or block.dropout > 0 or has_replicated_mlp


def traffic(view: View) -> list[TrafficRow]:
    """All collectives of mode 1d; zero for plans with other modes."""
    return collected(_sent(view))


def collected(sent: Iterable[Sent]) -> list[TrafficRow]:
    """One row of the tensor axis per collective and phase."""
    rows: dict[tuple[str, str], TrafficRow] = {}
    for collective, phase, nbytes, count in sent:
        before = rows.get((collective, phase))
        if before is not None:
            nbytes, count = before.bytes + nbytes, before.count + count
        rows[collective, phase] = TrafficRow(axes.TP, collective, phase, nbytes, count)
    return list(rows.values())


def _sent(view: View) -> Iterator[Sent]:
    columns = view.columns
    is_line = (columns.tp > 1) & (columns.tp_mode == TP_MODES.index("1d"))
    if not np.any(is_line):
        return
    sequence = columns.sequence_parallel > 0
    for is_folded, among in ((False, is_line & ~columns.folds_experts), (True, is_line & columns.folds_experts)):
        if np.any(among):
            yield from _among(_blocks(view, sequence=True, is_folded=is_folded), among & sequence)
            yield from _among(_blocks(view, sequence=False, is_folded=is_folded), among & ~sequence)
    yield from _among(_between_blocks(view), is_line & sequence)
    yield from _among(_partitioned_inputs(view), is_line & ~sequence & (columns.partition_inputs > 0))
    yield from _among([*_ends(view), *_update(view), *scale_collectives(view)], is_line)


def _among(sent: Iterable[Sent], plans: Bools) -> Iterator[Sent]:
    """`sent` of these plans, and nothing of others."""
    return ((collective, phase, nbytes * plans, count * plans) for collective, phase, nbytes, count in sent)


def _blocks(view: View, *, sequence: bool, is_folded: bool) -> Iterator[Sent]:
    for index, block in enumerate(view.shape.kinds):
        found = collectives_of(block, is_folded=is_folded)
        times = view.stage.blocks[:, index] * view.columns.microbatches
        recomputed = view.stage.recomputed
        recompute_times = (recomputed.full + recomputed.selective)[:, index] * view.columns.microbatches
        for is_recompute in (False, True):
            passed = _forward(view, block, found, sequence=sequence, is_recompute=is_recompute)
            repeated = recompute_times if is_recompute else times
            phase = "backward" if is_recompute else "forward"
            yield from ((name, phase, nbytes * repeated, count * repeated) for name, nbytes, count in passed)
        passed = _backward(view, block, found, sequence=sequence)
        yield from ((name, "backward", nbytes * times, count * times) for name, nbytes, count in passed)


def _forward(
    view: View, block: BlockShape, found: BlockCollectives, *, sequence: bool, is_recompute: bool
) -> Iterator[Passed]:
    """Collectives of one block's forward, or of its recompute."""
    stream, statistics = _stream(view), _numbers(view, FLOAT32_BYTES)
    exits = found.regions - (found.last_exits if is_recompute else 0)
    yield "all_reduce", _reduced(view, found.statistics_forward * statistics), found.statistics_forward
    if not sequence:
        yield "all_reduce", _reduced(view, exits * stream), exits
        shares = found.shares - (found.last_shares if is_recompute else 0)
        yield "all_gather", _gathered(view, shares * _shared(view, _row_bytes(view))), shares
        return
    entries = found.regions + found.replicated_mixers
    yield "all_gather", _gathered(view, entries * stream), entries
    yield "reduce_scatter", _gathered(view, exits * stream), exits
    if found.weights or found.choices:
        nbytes = found.choices * INDEX_BYTES + found.weights * _weight_bytes(view, block)
        yield "all_gather", _gathered(view, _numbers(view, _top_k(block) * nbytes)), found.choices + found.weights


def _backward(view: View, block: BlockShape, found: BlockCollectives, *, sequence: bool) -> Iterator[Passed]:
    stream, statistics = _stream(view), _numbers(view, FLOAT32_BYTES)
    yield "all_reduce", _reduced(view, found.numbers_backward * statistics), found.statistics_backward
    weights = _numbers(view, found.weights * _top_k(block) * _weight_bytes(view, block))
    if not sequence:
        yield "all_reduce", _reduced(view, found.regions * stream + weights), found.regions + found.weights
        per_token = _row_bytes(view) + _top_k(block) * _weight_bytes(view, block)
        yield "all_gather", _gathered(view, found.shares * _shared(view, per_token)), 2 * found.shares
        return
    entries = found.regions + found.replicated_mixers
    yield "all_gather", _gathered(view, found.regions * stream), found.regions
    yield "reduce_scatter", _gathered(view, entries * stream + weights), entries + found.weights


def _between_blocks(view: View) -> Iterator[Sent]:
    """Sequence parallel: all-gathers of the last block's output, and of the gradient of the first block's input."""
    nbytes = _gathered(view, _residual(view))
    for phase, is_here in (("forward", view.stage.holds_head), ("backward", view.stage.holds_embedding)):
        times = view.columns.microbatches * is_here
        yield "all_gather", phase, nbytes * times, times.astype(np.float64)


def _partitioned_inputs(view: View) -> Iterator[Sent]:
    """All-gathers of inputs of recomputed blocks, of which each rank keeps its share."""
    times = view.stage.recomputed.num_full * view.columns.microbatches
    yield "all_gather", "backward", _gathered(view, _residual(view)) * times, times


def _ends(view: View) -> Iterator[Sent]:
    """Collectives of token table, head and loss."""
    shape, stage = view.shape, view.stage
    width = (shape.embedding_size or shape.hidden_size) * view.sizes.activation
    times = view.columns.microbatches.astype(np.float64)
    # the forward of the model runs on every stage, with the token table if the rank holds it
    table: Floats = np.where(stage.holds_embedding & shape.has_sharded_table, times * stage.num_stages, 0.0)
    head: Floats = np.where(stage.holds_head & shape.has_sharded_head, times, 0.0)
    yield "all_reduce", "forward", _reduced(view, _numbers(view, width)) * table, table
    yield "all_reduce", "backward", _reduced(view, _numbers(view, width)) * head, head
    is_fused = view.columns.fused_loss > 0
    is_sharded = (view.columns.loss_parallel > 0) | is_fused
    yield (
        "all_reduce",
        "forward",
        _reduced(view, _numbers(view, 3 * FLOAT32_BYTES)) * head * is_sharded,
        2 * head * is_sharded * np.where(is_fused, num_chunks(view), 1.0),
    )
    padded = np.ceil(shape.vocab_size / view.columns.tp) * view.columns.tp * view.sizes.activation
    yield "all_gather", "forward", _gathered(view, view.tokens * padded) * head * ~is_sharded, head * ~is_sharded


def _update(view: View) -> Iterator[Sent]:
    """All-reduces of partial gradients: small ones together per group of ranks, those of repeated heads over copies.

    Each tensor adds one element: whether the rank has a gradient of it.
    """
    size = len(view.columns)
    shared, large, repeated, copies = (np.zeros(size) for _ in range(4))
    for index, block in enumerate(view.shape.kinds):
        count = view.stage.blocks[:, index]
        for held in trained_tensors_of(block, view.columns, is_adapted=view.shape.is_adapted):
            times = held.tensors * count
            if held.place in ("inside", "outside"):
                is_summed = (held.place == "inside") | (view.columns.sequence_parallel > 0)
                is_summed = is_summed & np.logical_not(held.is_divided)  # `~` of a Python bool is an integer
                shared = shared + (held.shard + 1) * times * is_summed
                large = large + times * is_summed * (held.shard > ALONE_ELEMENTS)
            elif held.repeats is not None:
                repeated = repeated + (held.repeated_shard + 1) * times * (held.repeats.copies > 1)
                copies = np.maximum(copies, held.repeats.copies)
    for elements, degree in ((shared, view.columns.tp.astype(np.float64)), (repeated, np.maximum(copies, 1.0))):
        nbytes = reduce_bytes(elements * view.sizes.gradient, degree) * (elements > SMALL_ELEMENTS)
        yield "all_reduce", "update", nbytes * view.columns.updates, (nbytes > 0) * view.columns.updates.astype(float)
    yield "all_reduce", "update", np.zeros(size), large * view.columns.updates


def _reduced(view: View, nbytes: Floats) -> Floats:
    return reduce_bytes(nbytes, view.columns.tp.astype(np.float64))


def _gathered(view: View, nbytes: Floats) -> Floats:
    return gather_bytes(nbytes, view.columns.tp.astype(np.float64))


def _stream(view: View) -> Floats:
    """Bytes of [tokens, hidden] that enter and leave regions."""
    return _numbers(view, _row_bytes(view))


def _residual(view: View) -> Floats:
    """Bytes of [tokens, hidden] between blocks."""
    return _numbers(view, view.shape.hidden_size * view.sizes.residual)


def _row_bytes(view: View) -> float:
    return view.shape.hidden_size * view.sizes.activation


def _shared(view: View, per_token: float) -> Floats:
    """Bytes of the tokens of a rank that are divided into equal shares."""
    return np.asarray(np.ceil(view.tokens / view.columns.tp) * view.columns.tp * per_token, dtype=np.float64)


def _numbers(view: View, per_token: float) -> Floats:
    return np.asarray(view.tokens * per_token, dtype=np.float64)


def _top_k(block: BlockShape) -> int:
    return block.moe.top_k if block.moe is not None else 0


def _weight_bytes(view: View, block: BlockShape) -> int:
    is_wide = block.moe is not None and block.moe.weighs_in_float32
    return FLOAT32_BYTES if is_wide else view.sizes.activation
