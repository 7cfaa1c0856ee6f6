"""Traffic of data parallelism: all-gathers and reduce-scatters by ZeRO stage, all-reduces of replicas."""

from __future__ import annotations

import numpy as np

from weft.core import axes
from weft.plan.axis import TrafficRow
from weft.plan.memory.parameters import table_elements
from weft.plan.time.links import gather_bytes, reduce_bytes
from weft.plan.view import View


def traffic(view: View) -> list[TrafficRow]:
    columns, stage, share, sizes = view.columns, view.stage, view.share, view.sizes
    has_root = stage.holds_embedding | stage.holds_head
    units = stage.blocks.sum(axis=1) + has_root
    # ZeRO-3 all-gathers the root for every stage of a rank, though only the first and the last use it
    extra_gathers = np.where(columns.zero == 3, stage.num_stages - 1, 0.0)
    gathered_units = units + extra_gathers * has_root
    m = columns.microbatches.astype(np.float64)
    shards = columns.shards.astype(np.float64)
    is_sharded = (columns.zero > 0) & (shards > 1)
    blocks = share.total.padded - share.root.padded
    gathered = gather_bytes(view.gathered_bytes(root=(1 + extra_gathers) * share.root.padded, blocks=blocks), shards)
    # a tied table on a rank with embedding and head is reduced once for each
    is_twice = (columns.zero >= 2) & (columns.pp > 1) & stage.holds_embedding & stage.holds_head & view.shape.tied_head
    twice = table_elements(view.shape, columns).padded * is_twice
    reduced = gather_bytes((share.total.padded + twice) * sizes.communication, shards)
    is_zero3 = columns.zero == 3
    forward_times = np.where(is_zero3, m, 1.0) * is_sharded
    backward_times = np.where(is_zero3, m, 0.0) * is_sharded
    reduce_times = np.where(columns.zero >= 2, m, 1.0) * is_sharded
    replicas = np.where(columns.zero > 0, columns.dp_replicate, columns.dp * columns.cp).astype(np.float64)
    held = np.where(columns.zero > 0, share.total.shard, share.total.unsharded) * sizes.communication
    scales = reduce_bytes(view.num_in_float8 * sizes.communication, shards) * is_sharded  # together, once per step
    return [
        TrafficRow(axes.DP_SHARD, "all_reduce", "forward", scales, (scales > 0).astype(np.float64)),
        TrafficRow(axes.DP_SHARD, "all_gather", "forward", gathered * forward_times, gathered_units * forward_times),
        TrafficRow(axes.DP_SHARD, "all_gather", "backward", gathered * backward_times, gathered_units * backward_times),
        TrafficRow(axes.DP_SHARD, "reduce_scatter", "backward", reduced * reduce_times, units * reduce_times),
        TrafficRow(
            axes.DP_REPLICATE, "all_reduce", "backward",
            reduce_bytes(held, replicas) * columns.updates, units * (replicas > 1) * columns.updates,
        ),
    ]  # fmt: skip
