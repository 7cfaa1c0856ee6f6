"""The terms of one instant of a step, and sizes that several instants share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.terms import MemoryTerm as Term
from weft.plan.columns import Bools, Floats
from weft.plan.memory.offloaded import staged_weights
from weft.plan.memory.saved_activations import SavedBlocks
from weft.plan.time.state_stream import rests_in_compute
from weft.plan.view import View

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
        root, total = view.cast.root.unsharded, view.cast.total.unsharded
        held = root + cast_share * (total - root)
        # weights at rest in the compute dtype need no cast
        casts = np.where(rests_in_compute(view), 0.0, (held - _unused_cast(view)) * sizes.compute)
    return np.select(
        [columns.zero == 0, columns.zero == 3],
        [casts, share.root.padded * sizes.compute],
        view.gathered_bytes(root=share.root.padded, blocks=share.total.padded - share.root.padded),
    )


def _unused_cast(view: View) -> Floats:
    """Elements of the embedding's cast: its backward needs no weight, so it is freed unless the head is tied."""
    if view.shape.has_low_base and not view.shape.trains_ends:
        return np.zeros(len(view.columns))
    table = table_elements(view)
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


def table_elements(view: View) -> Floats:
    divisor = view.columns.matrix_divisor if view.shape.has_sharded_table else np.ones(len(view.columns))
    return np.ceil(view.shape.vocab_size / divisor) * (view.shape.embedding_parameters // view.shape.vocab_size)


def codes_of_unit(view: View, elements: Floats) -> Floats:
    """Codes of a unit's gradients on their way, with the temporaries of encoding."""
    return np.asarray(elements * view.sizes.coding * (view.columns.shards > 1), dtype=np.float64)
