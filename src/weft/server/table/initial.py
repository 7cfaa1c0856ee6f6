"""The initial value of a row: a function of (seed, key, column) alone, the same on every server and worker.

    h(pair) = mix64(mix64(key ^ mix64(seed)) + pair * GOLDEN)     columns 2 * pair and 2 * pair + 1 use its two halves
    uniform = scale * (2 * u - 1),  u = half / 2**32              normal = scale * Box-Muller of both halves

Normal is computed in float64 and rounded: differences between mathematical libraries lie far below float32.
"""

from __future__ import annotations

import math

import numpy as np

from weft.server.arrays import Rows
from weft.server.table.compiled import compiled
from weft.server.table.hashing import mix64
from weft.server.table.record import Layout

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
LOW_HALF = np.uint64(0xFFFFFFFF)
HALF_BITS = np.uint64(32)
STEP = 2.0**-32
UNIFORM = 1


@compiled
def _pair(high: float, low: float, kind: int, scale: float) -> tuple[np.float32, np.float32]:
    if kind == UNIFORM:
        return np.float32(scale * (2.0 * high - 1.0)), np.float32(scale * (2.0 * low - 1.0))
    radius = scale * math.sqrt(-2.0 * math.log(high + STEP))  # + STEP: the logarithm of 0 would be infinite
    return np.float32(radius * math.cos(2.0 * math.pi * low)), np.float32(radius * math.sin(2.0 * math.pi * low))


@compiled
def fill_initial(out: Rows, row: int, first: int, key: int, layout: Layout) -> None:
    """Write the initial values of `key` to out[row, first:first + dim]."""
    dim = layout.dim
    if layout.init_kind == 0:
        for column in range(dim):
            out[row, first + column] = np.float32(0.0)
        return
    base = mix64(np.uint64(key) ^ mix64(np.uint64(layout.init_seed) + GOLDEN))
    for pair in range((dim + 1) // 2):
        bits = mix64(base + np.uint64(pair) * GOLDEN)
        left, right = _pair(
            np.float64(bits >> HALF_BITS) * STEP,
            np.float64(bits & LOW_HALF) * STEP,
            layout.init_kind,
            layout.init_scale,
        )
        out[row, first + 2 * pair] = left
        if 2 * pair + 1 < dim:
            out[row, first + 2 * pair + 1] = right
