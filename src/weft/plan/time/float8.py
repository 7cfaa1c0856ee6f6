"""Linear layers in float8: which ones, the passes that quantise their operands, and what the device makes of them.

    products   three, at the device's float8 rate; head, attention, experts and routers keep theirs
    quantise   every operand is read for its largest magnitude, read again and written in float8; the backward lays
               each of them out anew. Bytes an element of 16 bits moves on the way, one scale a tensor:

                   compiled     2 + 2 + 1 = 5, and 1 + 1 = 2 for the new layout
                   eager        abs 4, max 2, float 6, times 8, clamp 8, cast 5 = 33, and the time of 29 for the
                                layout: transposing bytes, torch's copy reaches a fraction of the bandwidth

Measured on an H200: layers of 2048 to 28,672 features within 7% compiled and 10% eager
(benchmarks/results/float8_layers-2026-11-17-h200.md); in a step of Llama 8B 80 ms of passes, counted 75, and products
of 1,344 TFLOP/s, by the catalogue 1,326 at most (benchmarks/results/gpu_step-2026-11-16-h200.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.cluster import Device
from weft.core.float8 import takes_float8
from weft.core.model_shape import LinearShape
from weft.core.plan import Float8Choice
from weft.plan.columns import Columns, Floats
from weft.plan.request import Request

RATE = "float8"
QUANTISED_COMPILED, QUANTISED_EAGER = 5.0, 33.0  # bytes moved, an element that is quantised
LAID_OUT_COMPILED, LAID_OUT_EAGER = 2.0, 29.0  # the same, an element that is laid out anew


def multiplies_in_float8(linear: LinearShape, choice: Float8Choice) -> bool:
    """Whether a matrix is a linear layer that `choice` takes: experts and transposed matrices are none."""
    is_linear = linear.role not in ("expert", "router") and not linear.is_transposed
    return is_linear and takes_float8(linear.in_features, linear.out_features, choice)


def has_float8(device: Device) -> bool:
    return RATE in device.rates


def why_no_float8(request: Request) -> str:
    """Why float8 products are priced as other products here, or nothing. GPUs without them are refused instead."""
    if has_float8(request.cluster.device) or not request.is_cpu:
        return ""
    return "a CPU has no float8 products: it multiplies rounded values in its own format, and rounding costs time"


@dataclass(frozen=True)
class QuantiseBytes:
    """Bytes that the passes around one layer's three products move."""

    forward: Floats
    backward: Floats


def quantise_bytes(columns: Columns, *, rows: Floats, inner: Floats, outer: Floats) -> QuantiseBytes:
    """Of a product [rows, inner] x [inner, outer]; a weight that was gathered in float8 arrives quantised."""
    is_compiled = columns.compiled > 0
    each = np.where(is_compiled, QUANTISED_COMPILED, QUANTISED_EAGER)
    anew = np.where(is_compiled, LAID_OUT_COMPILED, LAID_OUT_EAGER)
    inputs, weights, outputs = rows * inner, inner * outer, rows * outer
    arrives = (columns.float8 > 0) & (columns.shards > 1)
    return QuantiseBytes(
        forward=each * (inputs + np.where(arrives, 0.0, weights)),
        backward=each * outputs + anew * (outputs + inputs + weights),
    )
