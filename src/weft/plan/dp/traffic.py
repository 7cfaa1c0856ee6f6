"""Traffic of data parallelism: all-gathers and reduce-scatters by ZeRO stage, all-reduces of replicas.

Per unit: an all-gather per step (ZeRO-1, 2), or per forward and backward (ZeRO-3; with a secondary shard the backward's
is among its ranks); a reduce-scatter per step (ZeRO-1), or per backward (ZeRO-2, 3). Replicas: an all-reduce per unit
and step; without ZeRO one per bucket. Where codes travel
(`precision.reduce`) a reduce-scatter is an all-to-all, an all-reduce an all-to-all and an all-gather; by node
(`neighbours.py`) each is one inside nodes and one between them.
In expert parallelism the experts of a block are a unit of their own, on edp; without ZeRO each of their gradients is
all-reduced there before the update.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft.core import axes
from weft.plan.axis import SMALL_ELEMENTS, TrafficRow
from weft.plan.columns import Columns, Floats
from weft.plan.dp.all_reduce import replica_bytes
from weft.plan.dp.neighbours import by_node
from weft.plan.memory.instant import has_buckets
from weft.plan.memory.parameters import num_expert_tensors, table_elements
from weft.plan.time.links import gather_bytes, reduce_bytes
from weft.plan.time.state_stream import held_elements
from weft.plan.view import View

FIRST_BUCKET_BYTES = 2**20  # of DDP


def traffic(view: View) -> list[TrafficRow]:
    columns, stage, share, sizes = view.columns, view.stage, view.share, view.sizes
    has_root = stage.holds_embedding | stage.holds_head
    units = stage.blocks.sum(axis=1) + has_root
    has_experts = np.asarray([kind.moe is not None for kind in view.shape.kinds])
    expert_units = stage.blocks @ has_experts * (columns.ep > 1)
    # ZeRO-3 all-gathers the root for every stage of a rank, though only the first and the last use it
    extra_gathers = np.where(columns.zero == 3, stage.num_stages - 1, 0.0)
    gathered_units = units + extra_gathers * has_root
    shards = columns.shards.astype(np.float64)
    is_sharded = (columns.zero > 0) & (shards > 1)
    blocks = share.total.padded - share.root.padded - share.experts.padded
    roots = (1 + extra_gathers) * share.root.padded
    plain = view.gathered_bytes(root=roots, blocks=blocks)
    code_blocks = (share.total + share.root.times(extra_gathers)).shard_code_blocks - share.experts.shard_code_blocks
    coded = view.coded_bytes(roots + blocks, code_blocks * shards, plain)
    gathered = gather_bytes(coded, shards)
    # neighbours send what arrived, decoded
    again = np.where(columns.secondary_shard > 0, plain, coded)
    again = gather_bytes(again, columns.backward_shards.astype(np.float64))
    # two stages of a rank with embedding and head have gradients of the root: each is reduced, a tied table twice
    is_twice = (columns.zero >= 2) & (columns.pp > 1) & stage.holds_embedding & stage.holds_head
    trained = view.trained
    reduced_blocks = trained.total.padded - trained.root.padded - trained.experts.padded
    twice = table_elements(view.shape.trained, columns).times((is_twice & view.shape.tied_head).astype(np.float64))
    scales = trained.total.shard_code_blocks - trained.experts.shard_code_blocks + twice.shard_code_blocks
    sent = (trained.root.padded + reduced_blocks + twice.padded) * sizes.wire.number
    sent = sent + scales * shards * sizes.wire.block
    is_flat = columns.reduce_neighbours == 0
    forward_times, backward_times, reduce_times = (times * is_sharded for times in _times(columns))
    frozen_units = has_root * (trained.root.unsharded == 0)  # nothing of them is reduced
    reduces = (units - frozen_units + is_twice) * reduce_times
    replicas = np.where(columns.zero > 0, columns.dp_replicate, columns.dp * columns.cp).astype(np.float64)
    held = held_elements(view)
    has_scales = is_sharded & (view.num_in_float8 > SMALL_ELEMENTS)  # all together, once per step
    float8_scales = reduce_bytes(view.num_in_float8 * 4.0, shards) * has_scales
    is_coded = view.request.precision.has_coded_sums
    reduction = "all_to_all" if is_coded else "reduce_scatter"
    return [
        TrafficRow(axes.DP_SHARD, "all_reduce", "forward", float8_scales, has_scales.astype(np.float64)),
        TrafficRow(axes.DP_SHARD, "all_gather", "forward", gathered * forward_times, gathered_units * forward_times),
        TrafficRow(axes.DP_SHARD, "all_gather", "backward", again * backward_times, gathered_units * backward_times),
        TrafficRow(
            axes.DP_SHARD, reduction, "backward", gather_bytes(sent, shards) * reduce_times * is_flat, reduces * is_flat
        ),
        *(
            TrafficRow(axis, reduction, "backward", nbytes * reduce_times, reduces * (nbytes > 0))
            for axis, nbytes in by_node(columns, sent)
        ),
        *_between_replicas(view, held, replicas, units + expert_units),
        *_of_expert_units(view, expert_units, reduction),
        TrafficRow(axes.EDP, "all_reduce", "update", *_summed_experts(view)),
    ]  # fmt: skip


def _times(columns: Columns) -> tuple[Floats, Floats, Floats]:
    """How often a unit is gathered in forwards and in backwards, and its gradients reduced, per step."""
    m, is_zero3 = columns.microbatches.astype(np.float64), columns.zero == 3
    return np.where(is_zero3, m, 1.0), np.where(is_zero3, m, 0.0), np.where(columns.zero >= 2, m, 1.0)


def _of_expert_units(view: View, units: Floats, reduction: str) -> Iterator[TrafficRow]:
    """All-gathers and reduce-scatters of the experts of blocks, over the ranks that hold the same ones."""
    sizes, experts, trained = view.sizes, view.share.experts, view.trained.experts
    edp = view.columns.edp.astype(np.float64)
    is_sharded = (view.columns.zero > 0) & (edp > 1)
    coded = view.coded_bytes(experts.padded, experts.shard_code_blocks * edp, experts.padded * sizes.compute)
    gathered = gather_bytes(coded, edp)
    scales = trained.shard_code_blocks * edp * sizes.wire.block
    reduced = gather_bytes(trained.padded * sizes.wire.number + scales, edp)
    forwards, backwards, reductions = _times(view.columns)
    for name, phase, nbytes, times in (
        ("all_gather", "forward", gathered, forwards),
        ("all_gather", "backward", gathered, backwards),
        (reduction, "backward", reduced, reductions),
    ):
        yield TrafficRow(axes.EDP, name, phase, nbytes * times * is_sharded, units * times * is_sharded)


def _between_replicas(view: View, held: Floats, replicas: Floats, units: Floats) -> Iterator[TrafficRow]:
    """All-reduces of gradients over the replicas, or their two halves where codes travel."""
    columns, sizes = view.columns, view.sizes
    is_sent = (replicas > 1) * columns.updates.astype(np.float64)
    marks = columns.find_unused * has_buckets(view)  # DDP all-reduces the set of used parameters
    most, least = (np.where(columns.zero > 0, units, number + marks) * is_sent for number in (_most_buckets(view), 1.0))
    if view.request.precision.has_coded_sums:
        total = view.trained.total
        blocks = np.where(columns.zero > 0, total.shard_code_blocks, total.code_blocks)
        full = (held * sizes.wire.number + blocks * sizes.wire.block) * columns.updates
        in_nodes = (columns.reduce_neighbours > 0) & (columns.zero == 0)
        halves = [(axes.DP_REPLICATE, gather_bytes(full, replicas) * ~in_nodes), *by_node(columns, full * in_nodes)]
        for axis, half in halves:
            for name in ("all_to_all", "all_gather"):
                yield TrafficRow(axis, name, "backward", half, most * (half > 0), least=least * (half > 0))
        return
    summed = replica_bytes(held * sizes.communication, replicas, columns) * columns.updates
    yield TrafficRow(axes.DP_REPLICATE, "all_reduce", "backward", summed, most, least=least)


def _summed_experts(view: View) -> tuple[Floats, Floats]:
    """(bytes, count) of all-reduces of gradients of experts: one for each tensor of a block."""
    columns = view.columns
    is_summed = (columns.ep > 1) & (columns.zero == 0) & (columns.edp > 1)
    tensors = np.asarray([num_expert_tensors(kind) for kind in view.shape.kinds])
    elements = view.trained.experts.unsharded * is_summed
    nbytes = reduce_bytes(elements * view.sizes.gradient, columns.edp.astype(np.float64))
    return nbytes, np.asarray(view.stage.blocks @ tensors * is_summed, dtype=np.float64)


def _most_buckets(view: View) -> Floats:
    """DDP closes a bucket when it is full, replicas of a pipeline before it would be; each holds a matrix or more."""
    kinds = view.shape.trained.kinds
    matrices = np.asarray(
        [
            sum(linear.copies for linear in kind.linears) + sum(extra.is_factor for extra in kind.extras)
            for kind in kinds
        ]
    )
    most = 3.0 + view.stage.blocks @ matrices  # token table, head, and vectors after the last matrix
    nbytes = view.trained.total.unsharded * view.sizes.gradient
    bucket_bytes = view.columns.bucket_bytes
    first_bytes = np.minimum(FIRST_BUCKET_BYTES, bucket_bytes)
    full = 1.0 + np.ceil(np.maximum(nbytes - first_bytes, 0.0) / bucket_bytes)
    not_full = 2.0 * np.ceil(nbytes / bucket_bytes) - 1.0
    return np.where(view.columns.pp > 1, np.minimum(not_full, 2.0 * most), np.minimum(full, most))
