"""Traffic of expert parallelism: dispatch and combine, forward and backward."""

from __future__ import annotations

import numpy as np

from weft.core import axes
from weft.plan.axis import TrafficRow
from weft.plan.time.links import gather_bytes
from weft.plan.view import View


def traffic(view: View) -> list[TrafficRow]:
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
        TrafficRow(axes.EP, "all_to_all", "forward", 2 * one_way, 2 * count),
        TrafficRow(axes.EP, "all_to_all", "backward", 2 * one_way, 2 * count),
    ]
