"""Traffic of context parallelism: ring sends of keys and values, and of their gradients in the backward."""

from __future__ import annotations

import numpy as np

from weft.core import axes
from weft.plan.axis import TrafficRow
from weft.plan.view import View


def traffic(view: View) -> list[TrafficRow]:
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
