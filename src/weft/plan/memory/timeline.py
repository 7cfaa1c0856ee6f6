"""Fourteen instants of a step, each with its live memory, term by term; the largest is the peak of a rank.

    loss     all saved activations in flight, logits and their gradient
    head     the gradient of the logits, while ZeRO-3 all-gathers the root for the head's backward
    fetching a stage without the head begins its backward: root and last block are all-gathered (ZeRO-3)
    top      backward of the last block: its recomputed activations, the gradient of the head
    middle   the block before it: the first reduce-scatter is in flight
    second   the second block of the model: almost all gradients, almost no activations
    ends     end of the middle's and the second's backward: activations freed, gradients not yet reduced
    arriving the first block is all-gathered and copied out, its backward has not begun (ZeRO-3)
    bottom   backward of the first block
    table    all gradients, and that of the token table once more in the compute dtype
    sum      all gradients, and one bucket of the all-reduce between replicas of a pipeline
    root     all gradients but the root's, which exist unsharded and as reduce-scatter input (ZeRO)
    update   all gradients, no activations, the optimizer's temporaries

A budget adds the backward of the last recomputed block, full and selective. Experts sharded along an inner dimension
are copied once more when they are gathered: this adds the gather of the last block but one.

Terms are disjoint and add up. `peak.py` computes the resident terms and the saved activations.
The sharding semantics are those of `fully_shard`: one unit per block and the root, with the next unit prefetched.
"""

from __future__ import annotations

import numpy as np

from weft.core.terms import MemoryTerm as Term
from weft.plan.columns import Floats
from weft.plan.cp.sizes import attention_buffers
from weft.plan.memory.instant import (
    TermParts,
    Terms,
    codes_of_unit,
    has_buckets,
    held_gathered,
    instant,
    table_elements,
)
from weft.plan.memory.secondary import secondary_bytes
from weft.plan.memory.sequence_chunks import chunk_share, is_chunked
from weft.plan.memory.staging import staged_in_step
from weft.plan.memory.step_end import at_root, at_sum, at_table, at_update
from weft.plan.memory.weights import largest_values
from weft.plan.time.state_stream import rests_in_compute
from weft.plan.view import View

MIB = 2**20
MAX_ROW_SUM_BYTES = 132 * MIB  # (measured on Hopper)


def instants_of(parts: TermParts) -> dict[str, Terms]:
    """Instants by name, in the order of the step."""
    last = np.maximum(parts.num_blocks - 1, 0)
    return {
        "loss": _at_loss(parts),
        "gathering the head": _at_head(parts),
        "gathering the last block": _at_last_block(parts),
        "backward of the last block": _in_backward(parts, done=np.zeros(len(last))),
        "backward of the last block but one": _in_backward(parts, done=np.minimum(1.0, last)),
        "end of the last block but one": _at_block_end(parts, done=np.minimum(1.0, last)),
        "backward of the second block": _in_backward(parts, done=np.maximum(last - 1, 0)),
        "end of the second block": _at_block_end(parts, done=np.maximum(last - 1, 0)),
        "gathering the first block": _at_gather(parts, done=last),
        "backward of the first block": _in_backward(parts, done=last),
        "gradient of the token table": at_table(parts),
        "sum over replicas": at_sum(parts),
        "reducing the root": at_root(parts),
        "update": at_update(parts),
        **_in_mixture(parts),
        **_with_inner_shards(parts, done=np.minimum(1.0, last)),
    }


def _in_mixture(parts: TermParts) -> dict[str, Terms]:
    """Instants of a budget: its last recomputed block need not be among the last two blocks."""
    recomputed = parts.blocks.recomputed
    if not np.any(recomputed.is_mixed):
        return {}
    fully, selectively = recomputed.above_last("full"), recomputed.above_last("selective")
    # plans without a fully recomputed block in a mixture: an instant that every plan has
    is_here = recomputed.is_mixed & (recomputed.num_full > 0)
    fully = np.where(is_here, fully, np.minimum(1.0, np.maximum(parts.num_blocks - 1, 0)))
    return {
        "backward of the last recomputed block": _in_backward(parts, done=fully),
        "end of the last recomputed block": _at_block_end(parts, done=fully),
        "backward of the last selectively recomputed block": _in_backward(parts, done=selectively),
    }


def _with_inner_shards(parts: TermParts, *, done: Floats) -> dict[str, Terms]:
    if not np.any(parts.view.share.largest_inner):
        return {}
    return {"gathering the last block but one": _at_gather(parts, done=done)}


def _at_loss(parts: TermParts) -> Terms:
    columns = parts.view.columns
    # ZeRO-3 reshards the root when the forward ends, before the loss. A fused loss runs inside the forward: the root is
    # unsharded, and the all-gather output of the last block is held until the next all-gather
    share = parts.view.share
    inside = np.where(
        columns.fused_loss > 0, parts.view.gathered_bytes(root=share.root.padded, blocks=share.largest_padded), 0.0
    )
    gathered = np.where(columns.zero == 3, inside, held_gathered(parts.view))
    gathered = gathered + secondary_bytes(parts.view, left=parts.num_blocks, num_blocks=parts.num_blocks, has_root=True)
    staged = staged_in_step(parts.view, done=np.zeros(len(columns)))
    held = _held_reduce_input(parts)
    return instant(
        parts, saved=parts.saved_at_loss + parts.final, gathered=gathered, gradients=parts.earlier_gradients,
        logits=parts.logits, buffers=held, temporaries=staged, unit_elements=share.root.padded,
    )  # fmt: skip


def _held_reduce_input(parts: TermParts) -> Floats:
    """Input of the root's reduce-scatter, which `fully_shard` holds until the next one.

    A rank with several stages has reduced another stage since.
    """
    is_held = (parts.view.columns.zero >= 2) & parts.has_gradients & (parts.view.stage.num_stages == 1)
    return np.where(is_held, parts.view.trained.root.padded * parts.view.sizes.communication, 0.0)


def _at_head(parts: TermParts) -> Terms:
    """Other ZeRO stages gather nothing here, and their loss needs more."""
    view, sizes = parts.view, parts.view.sizes
    gathers = (view.columns.zero == 3) & view.stage.holds_head
    root = np.where(gathers, view.share.root.padded * sizes.compute, 0.0)
    staged = staged_in_step(view, done=np.zeros(len(root)))
    gradient = parts.num_logits * sizes.activation
    return {
        **_at_loss(parts),
        Term.GATHERED: root + secondary_bytes(view, left=parts.num_blocks, num_blocks=parts.num_blocks),
        Term.LOGITS: np.where(gathers, gradient + parts.held_logits, 0.0),
        Term.TEMPORARIES: root + staged,  # all-gather output before it is copied out
    }


def _at_last_block(parts: TermParts) -> Terms:
    """All-gather output and its copy-out both exist, beside all activations."""
    view = parts.view
    is_here = (view.columns.zero == 3) & (view.columns.pp > 1) & ~view.stage.holds_head
    units = view.gathered_bytes(root=view.share.root.padded, blocks=view.share.largest_padded)
    arrived = np.where(is_here, units, 0.0)
    again = view.share.largest_inner * view.block_bytes
    return {
        **_at_loss(parts),
        Term.GATHERED: arrived,
        Term.TEMPORARIES: np.where(is_here, arrived + again + view.stream_bytes, 0.0),
    }


def _in_backward(parts: TermParts, *, done: Floats) -> Terms:
    """Backward of the current block, after `done` finished ones."""
    view, columns, share, sizes = parts.view, parts.view.columns, parts.view.share, parts.view.sizes
    blocks = np.maximum(parts.num_blocks, 1)
    is_first, is_last = done == 0, done >= parts.num_blocks - 1
    streams = columns.zero == 3
    unit = share.largest_padded * view.block_bytes
    gathered = held_gathered(parts.view) + np.where(streams, unit + np.where(is_last, 0.0, unit), 0.0)
    is_cast = (columns.zero == 0) & sizes.is_mixed & ~rests_in_compute(view)
    block_cast = np.where(is_cast, view.cast.largest_block * sizes.compute, 0.0)
    # casts are freed block by block; recompute casts the current block again
    ahead = np.where(is_last, 1.0, 2.0)
    gathered = gathered + secondary_bytes(view, left=parts.num_blocks - done - ahead, num_blocks=parts.num_blocks)
    gathered = gathered + (parts.blocks.is_recomputed(done) - parts.blocks.casts_freed(done)) * block_cast
    before = parts.earlier_gradients
    trained = view.trained
    per_block = (trained.total.unsharded - trained.root.unsharded) / blocks
    per_block_shard = (trained.total.shard - trained.root.shard) / blocks
    reduced = np.where(columns.zero >= 2, per_block_shard, per_block) * sizes.gradient * done
    of_head = head_gradient(view)
    grown = np.maximum(before, np.where(parts.has_gradients, before, reduced))
    reduce_input = np.where(columns.zero == 0, 0.0, trained.largest_padded * sizes.communication)
    sent = reduce_input + codes_of_unit(view, trained.largest_padded)
    reduce_input = np.where(is_first, _held_reduce_input(parts), sent)
    own_gradient = trained.largest_block * sizes.compute
    wide = 2 * view.tokens * sizes.activation * parts.widest / columns.tp * chunk_share(view)
    wide = wide + is_chunked(view) * np.maximum(own_gradient + 2 * view.stream_bytes, _norm_gradients(view))
    waiting = np.where(columns.zero > 0, of_head, 0.0)  # the root is reduced last
    temporaries = wide + own_gradient / 3 + view.stream_bytes + waiting + _entry_gradients(view) + _received(view)
    temporaries = temporaries + staged_in_step(view, done=done) + _codes_of_bucket(view) + largest_values(view)
    return instant(
        parts,
        saved=np.maximum(parts.saved - parts.blocks.freed(done), 0.0) + parts.blocks.restored(done),
        gathered=np.maximum(gathered, 0.0),
        gradients=np.where(columns.zero == 0, np.maximum(grown, of_head), grown),
        logits=parts.held_logits,
        buffers=reduce_input + attention_buffers(view, wide=wide),
        temporaries=temporaries,
    )  # fmt: skip


def _received(view: View) -> Floats:
    """Gradient of a stage's output, until the backward of the stage ends."""
    return np.where((view.columns.pp > 1) & ~view.stage.holds_head, view.stream_bytes, 0.0)


def _entry_gradients(view: View) -> Floats:
    """Sequence parallel: gradients of a region's gathered input, of two linears, before the reduce-scatter."""
    is_sharded = (view.columns.sequence_parallel > 0) & (view.columns.tp > 1) & (view.columns.tp_mode == 0)
    return np.where(is_sharded, 2 * view.tokens * view.shape.hidden_size * view.sizes.activation, 0.0)


def _norm_gradients(view: View) -> Floats:
    """Backward of the norm before an MLP: two gradients of the stream, three in float32. Without chunks the inner
    activations of the MLP, which are freed by then, need more."""
    return np.asarray(view.stream_bytes * (2 + 12 / view.sizes.residual), dtype=np.float64)


def _at_block_end(parts: TermParts, *, done: Floats) -> Terms:
    """Backward of the first norm: all gradients of the block wait to be reduced, in the compute dtype."""
    view = parts.view
    begun = _in_backward(parts, done=done)
    # gradients of input and output, and two of the norm in float32
    stream = view.stream_bytes * (2 + 8 / view.sizes.residual)
    waits = view.columns.zero > 0
    own = np.where(waits, view.trained.largest_block * view.sizes.compute + head_gradient(view), 0.0)
    return {
        **begun,
        Term.ACTIVATIONS: np.maximum(parts.saved - parts.blocks.freed(done + 1), 0.0),
        Term.TEMPORARIES: own + stream + _row_sums(view) + staged_in_step(view, done=done + 1),
    }


def _row_sums(view: View) -> Floats:
    """Partial sums over rows on a GPU, for gradients of norms and biases."""
    if view.request.is_cpu:
        return np.zeros(len(view.columns))
    return np.minimum(8 * view.tokens * view.shape.hidden_size, MAX_ROW_SUM_BYTES)


def head_gradient(view: View) -> Floats:
    """Gradient of the output head; the embedding's comes last."""
    head = table_elements(view) * view.shape.trains_ends
    nbytes = np.where(view.columns.zero == 0, view.sizes.gradient, view.sizes.compute)
    return np.where(view.stage.holds_head, head * nbytes, 0.0)


def _at_gather(parts: TermParts, *, done: Floats) -> Terms:
    """ZeRO-3: all-gather output and its copy-out both exist; nothing is recomputed yet.

    Shards of an inner dimension are copied out twice.
    """
    view, backward = parts.view, _in_backward(parts, done=done)
    unit = view.share.largest_padded * view.block_bytes
    arriving = unit + view.share.largest_inner * view.block_bytes + head_gradient(view) + view.stream_bytes
    arriving = arriving + view.share.largest_padded * view.has_codes  # a byte each: the messages of all ranks
    is_zero3 = view.columns.zero == 3
    kept = secondary_bytes(view, left=parts.num_blocks - done - 1, num_blocks=parts.num_blocks)
    return {
        **backward,
        Term.GATHERED: np.where(is_zero3, held_gathered(view) + unit + kept, 0.0),
        Term.ACTIVATIONS: np.where(is_zero3, backward[Term.ACTIVATIONS] - parts.blocks.restored(done), 0.0),
        Term.TEMPORARIES: np.where(is_zero3, arriving + staged_in_step(view, done=done), 0.0),
    }


def _codes_of_bucket(view: View) -> Floats:
    """The same for a bucket of DDP."""
    if not view.sizes.coding:
        return np.zeros(len(view.columns))
    elements = np.minimum(view.columns.bucket_bytes / view.sizes.gradient, view.share.total.unsharded)
    return np.where(has_buckets(view), elements * view.sizes.coding, 0.0)
