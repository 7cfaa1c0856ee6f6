"""Instants after the backward of the blocks: gradients of token table and root, sums over replicas, the update."""

from __future__ import annotations

import numpy as np

from weft.plan import muon
from weft.plan.columns import Floats
from weft.plan.memory.instant import (
    TermParts,
    Terms,
    codes_of_unit,
    has_buckets,
    held_gathered,
    instant,
    table_elements,
)
from weft.plan.memory.offloaded import staged_states, updates_beside_compute
from weft.plan.memory.staging import chunks_within
from weft.plan.time.state_stream import chunk_bytes
from weft.plan.view import View

QUANTISED_UPDATE_BYTES = 24  # per element of the largest tensor: moments and intermediates, six in float32


def at_table(parts: TermParts) -> Terms:
    """The token table's gradient, the last of all, in the compute dtype and cast; with ZeRO see `at_root`.

    DDP's buckets exist already, so the cast gradient is extra, and the uncast one exists twice.
    """
    view, columns, sizes = parts.view, parts.view.columns, parts.view.sizes
    none = np.zeros(len(columns))
    is_last = (columns.zero == 0) & view.stage.holds_embedding & sizes.is_mixed & view.shape.trains_ends
    table = np.where(is_last, table_elements(view), 0.0)
    into_bucket = np.where(has_buckets(view), sizes.compute + sizes.gradient, 0)
    gradients = np.where(is_last, view.trained.total.unsharded * sizes.gradient, 0.0)
    return instant(
        parts, saved=none, gathered=none, gradients=gradients,
        buffers=none, temporaries=table * (sizes.compute + into_bucket) + np.where(is_last, _ahead(parts), 0.0),
    )  # fmt: skip


def at_sum(parts: TermParts) -> Terms:
    """All-reduce between replicas of a pipeline rank after the last backward; a large tensor is its own bucket."""
    view, columns = parts.view, parts.view.columns
    gradients = view.trained.total.unsharded * view.sizes.gradient
    is_summed = (columns.pp > 1) & (columns.zero == 0) & (columns.dp * columns.cp > 1)
    has_table = (view.stage.holds_embedding | view.stage.holds_head) & view.shape.trains_ends
    largest = np.where(has_table, table_elements(view) * view.sizes.gradient, 0.0)
    bucket = np.minimum(np.maximum(columns.bucket_bytes, largest), gradients)
    none = np.zeros(len(columns))
    return instant(
        parts, saved=none, gathered=none, gradients=np.where(is_summed, gradients, 0.0), buffers=none,
        temporaries=np.where(is_summed, bucket * (1 + view.sizes.coding / view.sizes.gradient), 0.0),
    )  # fmt: skip


def at_root(parts: TermParts) -> Terms:
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
            buffers=wire * sizes.communication + codes_of_unit(view, share.root.padded),
            temporaries=np.where(is_alone, 0.0, share.root.unsharded * per_element) + _ahead(parts),
        ).items()
    }  # fmt: skip


def at_update(parts: TermParts) -> Terms:
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
    table = np.where(view.stage.holds_embedding | view.stage.holds_head, table_elements(view), 0.0)
    matrix = max((linear.num_parameters for kind in view.shape.kinds for linear in kind.linears), default=0)
    return np.maximum(table, matrix / view.columns.tp)
