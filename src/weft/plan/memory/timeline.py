"""Fourteen instants of a step, each with what is alive then, term by term; the fullest of them is a rank's peak.

    loss     everything in flight is kept, logits and their gradient exist
    head     the gradient of the logits waits while ZeRO-3 gathers the root again, for the head's backward
    fetching a stage without the head begins its backward: the root and its last block come (ZeRO-3)
    top      backward of the last block: its recomputed parts, the head's gradient
    middle   one block further down: the first reduce-scatter is on its way
    second   the second block from the bottom: almost all gradients, almost no activations
    ends     at the end of the middle's and the second's: their activations are gone, their gradients whole
    arriving the first block has come over the wire and is laid out, its backward has not begun (ZeRO-3)
    bottom   the first block
    table    all gradients, and the token table's once more as it came, in the compute dtype
    sum      all gradients, and a bucket of them on its way between the replicas of a pipeline
    root     all gradients but the root's, which are there as they came and as they are laid out for the wire (ZeRO)
    update   all gradients, no activations, the optimizer's temporaries

A budget adds the backward of the last block that is computed again, fully and selectively, wherever it lies.

Terms are disjoint and add up. What is there at every instant, and what is kept, is put together in `memory`.
The sharding semantics are those of `fully_shard`: a unit a block and one for the rest, the next unit gathered ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.terms import MemoryTerm as Term
from weft.plan.columns import Bools, Floats
from weft.plan.memory.saved_activations import KeptBlocks
from weft.plan.view import View

MIB = 2**20
SUM_BUCKET_BYTES = 25 * MIB  # of gradients that replicas of a pipeline's rank sum together
MAX_ROW_SUM_BYTES = 132 * MIB  # (measured on Hopper)
QUANTISED_UPDATE_BYTES = 24  # an element of the largest tensor: its moments, and what comes between, six in float32

Terms = dict[Term, Floats]


@dataclass(frozen=True)
class TermParts:
    """What the instants are put together from."""

    view: View
    rest: Terms  # there at every instant
    kept: Floats  # activations of all blocks and micro-batches in flight
    kept_at_loss: Floats  # of them, while a loss is computed: then not all can be of a rank's largest stage
    final: Floats  # of the final norm, until the head's backward is done
    blocks: KeptBlocks  # of one micro-batch, block by block
    logits: Floats
    held_logits: Floats  # of other micro-batches in flight
    num_logits: Floats
    earlier_gradients: Floats  # there when the backward begins
    has_gradients: Bools  # of earlier micro-batches: those of DDP's buckets are none
    num_blocks: Floats
    widest: int  # numbers a token inside the widest MLP


def instants_of(parts: TermParts) -> dict[str, Terms]:
    """Name -> terms, in the order of the step."""
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
        "gathering the first block": _at_first_block(parts, done=last),
        "backward of the first block": _in_backward(parts, done=last),
        "gradient of the token table": _at_table(parts),
        "sum over replicas": _at_sum(parts),
        "reducing the root": _at_root(parts),
        "update": _at_update(parts),
        **_in_mixture(parts),
    }


def _in_mixture(parts: TermParts) -> dict[str, Terms]:
    """Of a budget: the first of the blocks that bring something back need not be among the last two."""
    again = parts.blocks.again
    if not np.any(again.is_mixed):
        return {}
    fully, selectively = again.above_last("full"), again.above_last("selective")
    return {
        "backward of the last block computed again": _in_backward(parts, done=fully),
        "end of the last block computed again": _at_block_end(parts, done=fully),
        "backward of the last block computed again selectively": _in_backward(parts, done=selectively),
    }


def _at_loss(parts: TermParts) -> Terms:
    columns = parts.view.columns
    # ZeRO-3 gives its root back when the forward ends, and the loss comes after that; unless it is fused with the head:
    # then the root is here, and the last block's as they came over the wire, which are held until the next gather
    share = parts.view.share
    inside = np.where(
        columns.fused_loss > 0, parts.view.gathered_bytes(root=share.root.padded, blocks=share.largest_padded), 0.0
    )
    gathered = np.where(columns.zero == 3, inside, _kept_gathered(parts.view))
    none = np.zeros(len(columns))
    held = _held_reduce_input(parts)
    return _instant(
        parts, kept=parts.kept_at_loss + parts.final, gathered=gathered, gradients=parts.earlier_gradients,
        logits=parts.logits, buffers=held, temporaries=none,
    )  # fmt: skip


def _held_reduce_input(parts: TermParts) -> Floats:
    """Between micro-batches `fully_shard` holds on to the input of its last reduce-scatter, the root's, until the next.

    A rank with several stages has passed another one since.
    """
    is_held = (parts.view.columns.zero >= 2) & parts.has_gradients & (parts.view.stage.num_stages == 1)
    return np.where(is_held, parts.view.share.root.padded * parts.view.sizes.communication, 0.0)


def _at_head(parts: TermParts) -> Terms:
    """For other stages than ZeRO-3 nothing is gathered here, and the loss needs more."""
    view, sizes = parts.view, parts.view.sizes
    gathers = (view.columns.zero == 3) & view.stage.holds_head
    root = np.where(gathers, view.share.root.padded * sizes.compute, 0.0)
    gradient = parts.num_logits * sizes.activation
    return {
        **_at_loss(parts),
        Term.GATHERED: root,
        Term.LOGITS: np.where(gathers, gradient + parts.held_logits, 0.0),
        Term.TEMPORARIES: root,  # what came over the wire, before it is laid out as parameters
    }


def _at_last_block(parts: TermParts) -> Terms:
    """As they came over the wire and as they are laid out: both are there, beside all activations."""
    view = parts.view
    is_here = (view.columns.zero == 3) & (view.columns.pp > 1) & ~view.stage.holds_head
    units = view.gathered_bytes(root=view.share.root.padded, blocks=view.share.largest_padded)
    come = np.where(is_here, units, 0.0)
    return {
        **_at_loss(parts),
        Term.GATHERED: come,
        Term.TEMPORARIES: np.where(is_here, come + view.stream_bytes, 0.0),
    }


def _in_backward(parts: TermParts, *, done: Floats) -> Terms:
    """The backward of the block that follows `done` finished ones."""
    view, columns, share, sizes = parts.view, parts.view.columns, parts.view.share, parts.view.sizes
    blocks = np.maximum(parts.num_blocks, 1)
    is_first, is_last = done == 0, done >= parts.num_blocks - 1
    is_zero3 = columns.zero == 3
    unit = share.largest_padded * view.block_bytes
    gathered = _kept_gathered(parts.view) + np.where(is_zero3, unit + np.where(is_last, 0.0, unit), 0.0)
    block_cast = np.where((columns.zero == 0) & sizes.is_mixed, share.largest_block * sizes.compute, 0.0)
    # casts are freed block by block; recomputation makes that of the block at work anew
    gathered = gathered + (parts.blocks.is_again(done) - parts.blocks.casts_freed(done)) * block_cast
    before = parts.earlier_gradients
    per_block = (share.total.whole - share.root.whole) / blocks
    per_block_shard = (share.total.shard - share.root.shard) / blocks
    reduced = np.where(columns.zero >= 2, per_block_shard, per_block) * sizes.gradient * done
    head_gradient = _head_gradient(view)
    grown = np.maximum(before, np.where(parts.has_gradients, before, reduced))
    reduce_input = np.where(columns.zero == 0, 0.0, share.largest_padded * sizes.communication)
    reduce_input = np.where(is_first, _held_reduce_input(parts), reduce_input)
    own_gradient = share.largest_block * sizes.compute
    wide = 2 * view.tokens * sizes.activation * parts.widest / columns.tp
    waiting = np.where(columns.zero > 0, head_gradient, 0.0)  # the root is reduced last
    temporaries = wide + own_gradient / 3 + view.stream_bytes + waiting + _entry_gradients(view) + _received(view)
    return _instant(
        parts,
        kept=np.maximum(parts.kept - parts.blocks.freed(done), 0.0) + parts.blocks.brought_back(done),
        gathered=np.maximum(gathered, 0.0),
        gradients=np.where(columns.zero == 0, np.maximum(grown, head_gradient), grown),
        logits=parts.held_logits,
        buffers=reduce_input,
        temporaries=temporaries,
    )  # fmt: skip


def _received(view: View) -> Floats:
    """The gradient of what a stage gave, until its backward is done."""
    return np.where((view.columns.pp > 1) & ~view.stage.holds_head, view.stream_bytes, 0.0)


def _entry_gradients(view: View) -> Floats:
    """Sequence parallel: the gradients of a region's whole input, of two linears, before they are cut."""
    is_cut = (view.columns.sequence_parallel > 0) & (view.columns.tp > 1) & (view.columns.tp_mode == 0)
    return np.where(is_cut, 2 * view.tokens * view.shape.hidden_size * view.sizes.activation, 0.0)


def _at_block_end(parts: TermParts, *, done: Floats) -> Terms:
    """The first norm's backward: all of the block's gradients wait to be reduced, in the compute dtype."""
    view = parts.view
    begun = _in_backward(parts, done=done)
    stream = view.stream_bytes * (2 + 8 / view.sizes.activation)  # gradients in and out, and a norm's two in float32
    waits = view.columns.zero > 0
    own = np.where(waits, view.share.largest_block * view.sizes.compute + _head_gradient(view), 0.0)
    return {
        **begun,
        Term.ACTIVATIONS: np.maximum(parts.kept - parts.blocks.freed(done + 1), 0.0),
        Term.TEMPORARIES: own + stream + _row_sums(view),
    }


def _row_sums(view: View) -> Floats:
    """A GPU sums the rows of a gradient, of norms and biases, in many parts at once."""
    if view.request.is_cpu:
        return np.zeros(len(view.columns))
    return np.minimum(8 * view.tokens * view.shape.hidden_size, MAX_ROW_SUM_BYTES)


def _head_gradient(view: View) -> Floats:
    """Of the output matrix alone: an embedding's comes last."""
    head = _table_elements(view)
    nbytes = np.where(view.columns.zero == 0, view.sizes.gradient, view.sizes.compute)
    return np.where(view.stage.holds_head, head * nbytes, 0.0)


def _at_first_block(parts: TermParts, *, done: Floats) -> Terms:
    """What arrived and what it is laid out as are both there; nothing is recomputed yet. ZeRO-3 only."""
    view, backward = parts.view, _in_backward(parts, done=done)
    unit = view.share.largest_padded * view.block_bytes
    arriving = unit + _head_gradient(view) + view.stream_bytes
    is_zero3 = view.columns.zero == 3
    return {
        **backward,
        Term.ACTIVATIONS: np.where(is_zero3, backward[Term.ACTIVATIONS] - parts.blocks.brought_back(done), 0.0),
        Term.TEMPORARIES: np.where(is_zero3, arriving, 0.0),
    }


def _at_table(parts: TermParts) -> Terms:
    """The last gradient of all, as it came and cast; ZeRO reduces the root as a whole, elsewhere.

    DDP's buckets are there already: the cast one is beside them, and what came is there twice.
    """
    view, columns, sizes = parts.view, parts.view.columns, parts.view.sizes
    none = np.zeros(len(columns))
    is_last = (columns.zero == 0) & view.stage.holds_embedding & sizes.is_mixed
    table = np.where(is_last, _table_elements(view), 0.0)
    into_bucket = np.where(has_buckets(view), sizes.compute + sizes.gradient, 0)
    return _instant(
        parts, kept=none, gathered=none, gradients=np.where(is_last, view.share.total.whole * sizes.gradient, 0.0),
        logits=none, buffers=none, temporaries=table * (sizes.compute + into_bucket),
    )  # fmt: skip


def _at_sum(parts: TermParts) -> Terms:
    """Replicas of a pipeline's rank sum when the last backward is done, in buckets; a large tensor is one alone."""
    view, columns = parts.view, parts.view.columns
    gradients = view.share.total.whole * view.sizes.gradient
    is_summed = (columns.pp > 1) & (columns.zero == 0) & (columns.dp * columns.cp > 1)
    has_table = view.stage.holds_embedding | view.stage.holds_head
    largest = np.where(has_table, _table_elements(view) * view.sizes.gradient, 0.0)
    bucket = np.minimum(np.maximum(SUM_BUCKET_BYTES, largest), gradients)
    none = np.zeros(len(columns))
    return _instant(
        parts, kept=none, gathered=none, gradients=np.where(is_summed, gradients, 0.0), logits=none, buffers=none,
        temporaries=np.where(is_summed, bucket, 0.0),
    )  # fmt: skip


def _table_elements(view: View) -> Floats:
    cut = view.columns.matrix_divisor if view.shape.has_cut_table else np.ones(len(view.columns))
    return np.ceil(view.shape.vocab_size / cut) * (view.shape.embedding_parameters // view.shape.vocab_size)


def _at_root(parts: TermParts) -> Terms:
    """Gradients of earlier micro-batches are there too, and until the last one weights that stay gathered. A rank
    alone sends nothing: what came is gone; what would be sent, what would arrive and its quotient are there."""
    view, columns, share, sizes = parts.view, parts.view.columns, parts.view.share, parts.view.sizes
    several, none = parts.has_gradients, np.zeros(len(columns))
    gradients = (share.total.shard - np.where(several, 0.0, share.root.shard)) * sizes.gradient
    a_number = np.where((columns.zero == 1) & several, sizes.communication, sizes.compute)
    is_alone = share.total.shard >= share.total.whole
    wire = share.root.padded + np.where(several, share.root.shard, 0.0)
    wire = np.where(is_alone, 3 * share.root.whole, wire)
    gathered = np.where((columns.zero == 2) & several, _kept_gathered(view), 0.0)
    return {
        term: np.where(columns.zero > 0, values, 0.0)
        for term, values in _instant(
            parts, kept=none, gathered=gathered, gradients=gradients, logits=none, buffers=wire * sizes.communication,
            temporaries=np.where(is_alone, 0.0, share.root.whole * a_number),
        ).items()
    }  # fmt: skip


def _at_update(parts: TermParts) -> Terms:
    columns, share, sizes = parts.view.columns, parts.view.share, parts.view.sizes
    held = np.where(columns.zero > 0, share.total.shard, share.total.whole)
    none = np.zeros(len(columns))
    temporaries = held * sizes.update
    if parts.view.request.workload.optimizer == "adamw8bit":
        temporaries = QUANTISED_UPDATE_BYTES * _largest_tensor(parts.view) * held / np.maximum(share.total.whole, 1)
    # an optimizer on the host has its temporaries there
    temporaries = np.where(columns.offload_optimizer > 0, 0.0, temporaries)
    return _instant(
        parts, kept=none, gathered=none, gradients=held * sizes.gradient, logits=none, buffers=none,
        temporaries=temporaries,
    )  # fmt: skip


def _largest_tensor(view: View) -> Floats:
    """Elements, whole over the data-parallel ranks: a table, or a block's largest matrix."""
    table = np.where(view.stage.holds_embedding | view.stage.holds_head, _table_elements(view), 0.0)
    matrix = max((linear.num_parameters for kind in view.shape.kinds for linear in kind.linears), default=0)
    return np.maximum(table, matrix / view.columns.tp)


def _instant(
    parts: TermParts,
    *,
    kept: Floats,
    gathered: Floats,
    gradients: Floats,
    logits: Floats,
    buffers: Floats,
    temporaries: Floats,
) -> Terms:
    view = parts.view
    # an optimizer on the host takes each gradient as it comes: two blocks are on the device at a time
    few = np.minimum(gradients, 2 * view.share.largest_block * view.sizes.gradient)
    return {
        **parts.rest,
        Term.GRADIENTS: np.where(view.columns.offload_optimizer > 0, few, gradients),
        Term.GATHERED: gathered,
        Term.ACTIVATIONS: kept,
        Term.LOGITS: logits,
        Term.COMM_BUFFERS: buffers + _peer_buffers(view),
        Term.TEMPORARIES: temporaries,
    }


def _kept_gathered(view: View) -> Floats:
    """Weights in the compute dtype that stay through forward and backward, beyond the block in use."""
    columns, share, sizes = view.columns, view.share, view.sizes
    casts = np.zeros(len(columns))
    if sizes.is_mixed:
        # the cast is part of a block's forward: recomputed with it, not kept
        again = view.stage.again
        share_kept = 1 - (again.num_full + again.num_selective) / np.maximum(again.held, 1)
        held = share.root.whole + share_kept * (share.total.whole - share.root.whole)
        casts = (held - _unused_cast(view)) * sizes.compute
    kept = np.select(
        [columns.zero == 0, columns.zero == 3],
        [casts, share.root.padded * sizes.compute],
        view.gathered_bytes(root=share.root.padded, blocks=share.total.padded - share.root.padded),
    )
    # weights that live on the host come unit by unit whatever the stage
    return np.where(columns.offload_parameters > 0, share.root.padded * sizes.compute, kept)


def _unused_cast(view: View) -> Floats:
    """The embedding's backward needs no weight, so its cast is freed at once, unless the head is the same tensor."""
    table = _table_elements(view)
    is_kept = view.stage.holds_head if view.shape.tied_head else np.zeros(len(view.columns), dtype=bool)
    return np.where(view.stage.holds_embedding & ~is_kept, table, 0.0)


def gradients_of_earlier(view: View) -> Floats:
    """Gradients that exist when a micro-batch's backward begins, and others had theirs before."""
    columns, share, sizes = view.columns, view.share, view.sizes
    return np.select(
        [columns.zero == 0, columns.zero == 1],
        [share.total.whole * sizes.gradient, share.total.whole * sizes.communication],
        share.total.shard * sizes.gradient,
    )


def has_buckets(view: View) -> Bools:
    """DDP's hold all gradients, always; in a pipeline replicas are summed without them."""
    columns = view.columns
    return (columns.zero == 0) & (columns.dp * columns.cp > 1) & (columns.pp == 1)


def _peer_buffers(view: View) -> Floats:
    """Receive buffers of the ring of context parallelism; what a stage receives it keeps."""
    return np.where(view.columns.cp > 1, 2 * view.stream_bytes, 0.0)
