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

from dataclasses import dataclass

import numpy as np

from weft.core.terms import MemoryTerm as Term
from weft.plan import muon
from weft.plan.columns import Bools, Floats
from weft.plan.cp.sizes import attention_buffers
from weft.plan.memory.offloaded import staged_states, staged_weights, updates_beside_compute
from weft.plan.memory.saved_activations import SavedBlocks
from weft.plan.memory.secondary import secondary_bytes
from weft.plan.memory.staging import chunks_within, staged_in_step
from weft.plan.time.state_stream import chunk_bytes, rests_in_compute
from weft.plan.view import View

MIB = 2**20
MAX_ROW_SUM_BYTES = 132 * MIB  # (measured on Hopper)
QUANTISED_UPDATE_BYTES = 24  # per element of the largest tensor: moments and intermediates, six in float32

Terms = dict[Term, Floats]


@dataclass(frozen=True)
class TermParts:
    """Inputs of the instants."""

    view: View
    rest: Terms  # resident at every instant
    saved: Floats  # activations of all blocks and micro-batches in flight
    saved_at_loss: Floats  # while a loss is computed: then not all can be on the largest stage of the rank
    final: Floats  # of the final norm, until the head's backward ends
    blocks: SavedBlocks  # of one micro-batch, per block
    logits: Floats
    held_logits: Floats  # of other micro-batches in flight
    num_logits: Floats
    earlier_gradients: Floats  # present when the backward begins
    has_gradients: Bools  # of earlier micro-batches; DDP's buckets do not count
    num_blocks: Floats
    widest: int  # elements per token inside the widest MLP
    delayed_gradients: Floats  # of the step before, whose update is delayed and on the device
    delayed_chunks: Floats  # chunks of that update, which exist throughout


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
        "gradient of the token table": _at_table(parts),
        "sum over replicas": _at_sum(parts),
        "reducing the root": _at_root(parts),
        "update": _at_update(parts),
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
    block_cast = np.where(is_cast, share.largest_block * sizes.compute, 0.0)
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
    reduce_input = np.where(is_first, _held_reduce_input(parts), reduce_input + _codes(view, trained.largest_padded))
    own_gradient = trained.largest_block * sizes.compute
    wide = 2 * view.tokens * sizes.activation * parts.widest / columns.tp
    waiting = np.where(columns.zero > 0, of_head, 0.0)  # the root is reduced last
    temporaries = wide + own_gradient / 3 + view.stream_bytes + waiting + _entry_gradients(view) + _received(view)
    temporaries = temporaries + staged_in_step(view, done=done) + _codes_of_bucket(view)
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
    head = _table_elements(view) * view.shape.trains_ends
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


def _at_table(parts: TermParts) -> Terms:
    """The token table's gradient, the last of all, in the compute dtype and cast; with ZeRO see `_at_root`.

    DDP's buckets exist already, so the cast gradient is extra, and the uncast one exists twice.
    """
    view, columns, sizes = parts.view, parts.view.columns, parts.view.sizes
    none = np.zeros(len(columns))
    is_last = (columns.zero == 0) & view.stage.holds_embedding & sizes.is_mixed & view.shape.trains_ends
    table = np.where(is_last, _table_elements(view), 0.0)
    into_bucket = np.where(has_buckets(view), sizes.compute + sizes.gradient, 0)
    gradients = np.where(is_last, view.trained.total.unsharded * sizes.gradient, 0.0)
    return instant(
        parts, saved=none, gathered=none, gradients=gradients,
        buffers=none, temporaries=table * (sizes.compute + into_bucket) + np.where(is_last, _ahead(parts), 0.0),
    )  # fmt: skip


def _at_sum(parts: TermParts) -> Terms:
    """All-reduce between replicas of a pipeline rank after the last backward; a large tensor is its own bucket."""
    view, columns = parts.view, parts.view.columns
    gradients = view.trained.total.unsharded * view.sizes.gradient
    is_summed = (columns.pp > 1) & (columns.zero == 0) & (columns.dp * columns.cp > 1)
    has_table = (view.stage.holds_embedding | view.stage.holds_head) & view.shape.trains_ends
    largest = np.where(has_table, _table_elements(view) * view.sizes.gradient, 0.0)
    bucket = np.minimum(np.maximum(columns.bucket_bytes, largest), gradients)
    none = np.zeros(len(columns))
    return instant(
        parts, saved=none, gathered=none, gradients=np.where(is_summed, gradients, 0.0), buffers=none,
        temporaries=np.where(is_summed, bucket * (1 + view.sizes.coding / view.sizes.gradient), 0.0),
    )  # fmt: skip


def _codes(view: View, elements: Floats) -> Floats:
    """Codes of a unit's gradients on their way, with the temporaries of encoding."""
    return np.asarray(elements * view.sizes.coding * (view.columns.shards > 1), dtype=np.float64)


def _codes_of_bucket(view: View) -> Floats:
    """The same for a bucket of DDP."""
    if not view.sizes.coding:
        return np.zeros(len(view.columns))
    elements = np.minimum(view.columns.bucket_bytes / view.sizes.gradient, view.share.total.unsharded)
    return np.where(has_buckets(view), elements * view.sizes.coding, 0.0)


def _table_elements(view: View) -> Floats:
    divisor = view.columns.matrix_divisor if view.shape.has_sharded_table else np.ones(len(view.columns))
    return np.ceil(view.shape.vocab_size / divisor) * (view.shape.embedding_parameters // view.shape.vocab_size)


def _at_root(parts: TermParts) -> Terms:
    """Reduce-scatter of the root, with gradients of earlier micro-batches and, before the last, gathered weights.

    With one shard nothing is sent: input and output exist, among replicas the divided gradient; the other is freed.
    """
    view, columns, share, sizes = parts.view, parts.view.columns, parts.view.trained, parts.view.sizes
    several, none = parts.has_gradients, np.zeros(len(columns))
    gradients = (share.total.shard - np.where(several, 0.0, share.root.shard)) * sizes.gradient
    per_element = np.where((columns.zero == 1) & several, sizes.communication, sizes.compute)
    is_alone = share.total.shard >= share.total.unsharded
    wire = share.root.padded + np.where(several, share.root.shard, 0.0)
    wire = np.where(is_alone, np.where(columns.dp_replicate > 1, 3, 2) * share.root.unsharded, wire)
    gathered = np.where((columns.zero == 2) & several, held_gathered(view), 0.0)
    return {
        term: np.where(columns.zero > 0, values, 0.0)
        for term, values in instant(
            parts, saved=none, gathered=gathered, gradients=gradients,
            buffers=wire * sizes.communication + _codes(view, share.root.padded),
            temporaries=np.where(is_alone, 0.0, share.root.unsharded * per_element) + _ahead(parts),
        ).items()
    }  # fmt: skip


def _at_update(parts: TermParts) -> Terms:
    columns, share, sizes = parts.view.columns, parts.view.trained, parts.view.sizes
    held = np.where(columns.zero > 0, share.total.shard, share.total.unsharded)
    none = np.zeros(len(columns))
    temporaries = held * sizes.update
    if parts.view.request.workload.optimizer == "adamw8bit":
        temporaries = QUANTISED_UPDATE_BYTES * _largest_tensor(parts.view) * held / np.maximum(share.total.unsharded, 1)
    if parts.view.request.workload.optimizer == "muon":
        temporaries = muon.update_temporaries(parts.view)
    # an offloaded optimizer updates chunk by chunk
    states = np.minimum(
        staged_states(parts.view) + _ahead(parts),
        np.maximum(held * chunk_bytes(parts.view), staged_states(parts.view)),
    )
    passing = np.where(updates_beside_compute(parts.view), 0.0, states)
    is_quantised = parts.view.request.workload.optimizer == "adamw8bit"
    passing = passing + (temporaries if is_quantised else 0.0)  # its kernel takes whole tensors, offloaded or not
    temporaries = np.where(columns.offload_optimizer > 0, passing, temporaries)
    gradients = held * sizes.gradient
    return instant(parts, saved=none, gathered=none, gradients=gradients, buffers=none, temporaries=temporaries)


def _ahead(parts: TermParts) -> Floats:
    """Chunks of states that are loaded when the last backward ends: the staging, and as much as it has freed since its
    first block's end."""
    view, columns = parts.view, parts.view.columns
    done = np.minimum(1.0, parts.num_blocks)
    freed = np.maximum(parts.saved - parts.blocks.freed(done), 0.0)
    begun = np.where(parts.has_gradients | has_buckets(view), 1.0, 0.0)
    share = view.trained.total.unsharded * np.where(columns.zero >= 2, 1.0 / columns.shards, 1.0)
    grown = (1 - begun) * share * view.sizes.gradient * (1 - done / np.maximum(parts.num_blocks, 1))
    return chunks_within(view, columns.staging_bytes.astype(np.float64) + np.maximum(freed - grown, 0.0))


def _largest_tensor(view: View) -> Floats:
    """Unsharded elements of the largest tensor: a table or a matrix of a block."""
    table = np.where(view.stage.holds_embedding | view.stage.holds_head, _table_elements(view), 0.0)
    matrix = max((linear.num_parameters for kind in view.shape.kinds for linear in kind.linears), default=0)
    return np.maximum(table, matrix / view.columns.tp)


def instant(
    parts: TermParts,
    *,
    saved: Floats,
    gathered: Floats,
    gradients: Floats,
    buffers: Floats,
    temporaries: Floats,
    logits: Floats | float = 0.0,
    unit_elements: Floats | None = None,
) -> Terms:
    """The terms of one instant, with those that are resident; `unit_elements`: of a unit that comes from the host."""
    view = parts.view
    unit = view.share.largest_padded if unit_elements is None else unit_elements
    return {
        **parts.rest,
        Term.GRADIENTS: gradients + parts.delayed_gradients,
        Term.GATHERED: gathered,
        Term.ACTIVATIONS: saved,
        Term.LOGITS: logits + np.zeros(len(view.columns)),
        Term.COMM_BUFFERS: buffers + staged_weights(view, unit) + parts.delayed_chunks,
        Term.TEMPORARIES: temporaries,
    }


def held_gathered(view: View) -> Floats:
    """Weights in the compute dtype that are held through forward and backward, beyond the current block."""
    columns, share, sizes = view.columns, view.share, view.sizes
    casts = np.zeros(len(columns))
    if sizes.is_mixed:
        # the cast is part of a block's forward: recompute repeats it
        recomputed = view.stage.recomputed
        cast_share = 1 - (recomputed.num_full + recomputed.num_selective) / np.maximum(recomputed.held, 1)
        held = share.root.unsharded + cast_share * (share.total.unsharded - share.root.unsharded)
        # weights at rest in the compute dtype need no cast
        casts = np.where(rests_in_compute(view), 0.0, (held - _unused_cast(view)) * sizes.compute)
    return np.select(
        [columns.zero == 0, columns.zero == 3],
        [casts, share.root.padded * sizes.compute],
        view.gathered_bytes(root=share.root.padded, blocks=share.total.padded - share.root.padded),
    )


def _unused_cast(view: View) -> Floats:
    """Elements of the embedding's cast: its backward needs no weight, so it is freed unless the head is tied."""
    table = _table_elements(view)
    is_used = view.stage.holds_head if view.shape.tied_head else np.zeros(len(view.columns), dtype=bool)
    return np.where(view.stage.holds_embedding & ~is_used, table, 0.0)


def gradients_of_earlier(view: View) -> Floats:
    """Gradients of earlier micro-batches when a backward begins."""
    columns, share, sizes = view.columns, view.trained, view.sizes
    return np.select(
        [columns.zero == 0, columns.zero == 1],
        [share.total.unsharded * sizes.gradient, share.total.unsharded * sizes.communication],
        share.total.shard * sizes.gradient,
    )


def has_buckets(view: View) -> Bools:
    """Whether DDP's buckets hold all gradients throughout; replicas of a pipeline have none."""
    columns = view.columns
    return (columns.zero == 0) & (columns.dp * columns.cp > 1) & (columns.pp == 1)
