"""Bytes a rank puts on the wire in one step, by (axis, collective, phase), for every plan.

`bytes` follow the ring factors of links.py; `count` is the number of collectives.
Per block and micro-batch, with t tokens of h numbers:
    tensor 1-D     2 all-reduces forward, 2 backward, or as many gathers and scatters, and more: see line_traffic
    tensor grids   panels of activations and of weights: see grid_traffic
    context        a ring passes keys and values (cp - 1) times forward, keys, values and their gradients backward
    expert         dispatch and combine, forward and backward
Per step and unit: ZeRO's table of gathers and reduces; between stages one activation a micro-batch and boundary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core import axes
from weft.plan.columns import Floats
from weft.plan.grid_traffic import grid_traffic
from weft.plan.line_traffic import line_traffic
from weft.plan.links import gather_bytes, reduce_bytes
from weft.plan.parameters import table_elements
from weft.plan.stages import PLACES
from weft.plan.view import View

EP = "ep"


@dataclass(frozen=True)
class TrafficRow:
    """One kind of collective, a number a plan."""

    axis: str
    collective: str
    phase: str
    bytes: Floats
    count: Floats


@dataclass(frozen=True)
class Traffic:
    """All rows, and what they were counted from."""

    rows: tuple[TrafficRow, ...]

    def of(self, *axis_names: str, phase: str | None = None) -> tuple[Floats, Floats]:
        """(bytes, count) summed over these axes and, if given, one phase."""
        chosen = [row for row in self.rows if row.axis in axis_names and phase in (None, row.phase)]
        size = len(self.rows[0].bytes)
        zero = np.zeros(size)
        return (
            sum((row.bytes for row in chosen), start=zero),
            sum((row.count for row in chosen), start=zero),
        )


def estimate_traffic(view: View) -> Traffic:
    """The traffic of one step of the rank that `view` looks at."""
    rows = [
        *_data_parallel(view),
        *_tensor_parallel(view),
        *_context_parallel(view),
        *_expert_parallel(view),
        *_pipeline(view),
    ]
    return Traffic(tuple(rows))


def _data_parallel(view: View) -> list[TrafficRow]:
    columns, stage, share, sizes = view.columns, view.stage, view.share, view.sizes
    has_root = stage.holds_embedding | stage.holds_head
    units = stage.blocks.sum(axis=1) + has_root
    # ZeRO-3 gathers the root for every stage of a rank that passes, though only the ends use it
    again = np.where(columns.zero == 3, stage.num_stages - 1, 0.0)
    gathered_units = units + again * has_root
    m = columns.microbatches.astype(np.float64)
    shards = columns.shards.astype(np.float64)
    is_sharded = (columns.zero > 0) & (shards > 1)
    blocks = share.total.padded - share.root.padded
    gathered = gather_bytes(view.gathered_bytes(root=(1 + again) * share.root.padded, blocks=blocks), shards)
    # a tied table on a rank with both ends brings a gradient with each of them
    is_twice = (columns.zero >= 2) & (columns.pp > 1) & stage.holds_embedding & stage.holds_head & view.shape.tied_head
    twice = table_elements(view.shape, columns).padded * is_twice
    reduced = gather_bytes((share.total.padded + twice) * sizes.communication, shards)
    is_zero3 = columns.zero == 3
    forward_times = np.where(is_zero3, m, 1.0) * is_sharded
    backward_times = np.where(is_zero3, m, 0.0) * is_sharded
    reduce_times = np.where(columns.zero >= 2, m, 1.0) * is_sharded
    replicas = np.where(columns.zero > 0, columns.dp_replicate, columns.dp * columns.cp).astype(np.float64)
    held = np.where(columns.zero > 0, share.total.shard, share.total.whole) * sizes.communication
    scales = reduce_bytes(view.num_in_float8 * sizes.communication, shards) * is_sharded  # together, once a step
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


def _tensor_parallel(view: View) -> list[TrafficRow]:
    """A row for each (collective, phase)."""
    rows: dict[tuple[str, str], TrafficRow] = {}
    for collective, phase, nbytes, count in (*line_traffic(view), *grid_traffic(view)):
        before = rows.get((collective, phase))
        if before is not None:
            nbytes, count = before.bytes + nbytes, before.count + count
        rows[collective, phase] = TrafficRow(axes.TP, collective, phase, nbytes, count)
    return list(rows.values())


def _context_parallel(view: View) -> list[TrafficRow]:
    request, columns, stage, sizes = view.request, view.columns, view.stage, view.sizes
    cp, m = columns.cp.astype(np.float64), columns.microbatches.astype(np.float64)
    tokens = view.tokens
    forward = np.zeros(len(columns))
    layers = np.zeros(len(columns))
    for index, block in enumerate(request.shape.kinds):
        if block.attention is None:
            continue
        heads = np.ceil(block.attention.num_kv_heads / np.minimum(columns.tp, block.attention.num_kv_heads))
        width = heads * (block.attention.head_dim + block.attention.value_dim)
        forward = forward + stage.blocks[:, index] * tokens * width * sizes.activation * (cp - 1)
        layers = layers + stage.blocks[:, index]
    count = layers * (cp - 1) * m
    return [
        TrafficRow(axes.CP, "send", "forward", forward * m, count),
        TrafficRow(axes.CP, "send", "backward", 2 * forward * m, 2 * count),
    ]


def _expert_parallel(view: View) -> list[TrafficRow]:
    request, columns, stage, sizes = view.request, view.columns, view.stage, view.sizes
    ep, m = columns.ep.astype(np.float64), columns.microbatches.astype(np.float64)
    tokens = view.tokens / np.where(columns.sequence_parallel > 0, columns.tp, 1)
    routed = np.zeros(len(columns))
    layers = np.zeros(len(columns))
    for index, block in enumerate(request.shape.kinds):
        if block.moe is None:
            continue
        routed = routed + stage.blocks[:, index] * tokens * block.moe.top_k * request.shape.hidden_size
        layers = layers + stage.blocks[:, index]
    one_way = gather_bytes(routed * sizes.activation, ep) * m
    count = layers * m * (ep > 1)
    return [
        TrafficRow(EP, "all_to_all", "forward", 2 * one_way, 2 * count),
        TrafficRow(EP, "all_to_all", "backward", 2 * one_way, 2 * count),
    ]


def _pipeline(view: View) -> list[TrafficRow]:
    """A rank sends on what its stages compute, but for the very last, and gradients back, but for the very first."""
    columns, stage = view.columns, view.stage
    m = columns.microbatches * (columns.pp > 1)
    turns = columns.is_v_shaped & (PLACES[view.place] == "last")  # a V turns on its last rank, where nothing is sent
    stages = columns.virtual_stages - turns
    forward, backward = m * (stages - stage.holds_head), m * (stages - stage.holds_embedding)
    sends = [
        TrafficRow(axes.PP, "send", phase, np.asarray(view.stream_bytes * times), times.astype(np.float64))
        for phase, times in (("forward", forward), ("backward", backward))
    ]
    return [*sends, _shared_table(view)]


def _shared_table(view: View) -> TrafficRow:
    """A table that is the head too, on two ranks: its gradients are summed between them."""
    columns, stage = view.columns, view.stage
    is_shared = (columns.pp > 1) & (stage.holds_embedding != stage.holds_head) & view.shape.tied_head
    held = table_elements(view.shape, columns)
    elements = np.where(columns.zero > 0, held.shard, held.whole)
    nbytes = reduce_bytes(elements * view.sizes.gradient, np.full(len(columns), 2.0)) * is_shared
    return TrafficRow(axes.PP, "all_reduce", "update", nbytes, is_shared.astype(np.float64))
