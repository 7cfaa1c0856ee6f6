"""Float8 linears: the matrices that use it, the passes that quantise operands, the device's support.

    matmuls    three per linear at the device's float8 rate; head, attention, experts and routers keep their dtype
    quantise   every operand is read for its largest magnitude, read again and written in float8; the backward
               transposes each. Bytes moved per 16-bit element, with one scale per tensor:

                   compiled     2 + 2 + 1 = 5, and 1 + 1 = 2 for the transpose
                   eager        abs 4, max 2, float 6, times 8, clamp 8, cast 5 = 33, and the time of 29 for the
                                transpose: torch's copy of bytes reaches a fraction of the bandwidth

Delayed scales come with an amax of the same operands, outside of compiled graphs: the passes of eager tensors.
Other recipes quantise an operand for each product that reads it, twice per step, from 16 bits: rows as above, blocks in
one pass (2 + 1 compiled); the transpose is part of it. Scales are written and read in float32.

Measured on an H200: layers of 2048 to 28,672 features within 7% compiled and 10% eager
(benchmarks/results/float8_layers-2026-11-17-h200.md); in a step of Llama 8B 80 ms of passes, predicted 75, and matmuls
at 1,344 TFLOP/s, 1,326 at most by the catalogue (benchmarks/results/gpu_step-2026-11-16-h200.md). Products of rows ran
at 0.92 of the rate of those of tensors, which stands for blocks too; passes of other recipes were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.cluster import Device
from weft.core.float8 import takes_float8
from weft.core.float8_section import EMULATED, RECIPES, WHOLE, Float8Choice, Float8Recipe
from weft.core.model_shape import LinearShape
from weft.plan.columns import Bools, Columns, Floats
from weft.plan.request import Request

RATE = "float8"
QUANTISED_COMPILED, QUANTISED_EAGER = 5.0, 33.0  # bytes moved per quantised element
TRANSPOSED_COMPILED, TRANSPOSED_EAGER = 2.0, 29.0  # bytes moved per transposed element
SCALE_BYTES = 2 * 4.0  # written and read
# of recipes that quantise for each product: bytes moved per element compiled, elements of an activation with one scale
_PASSES: dict[Float8Recipe, tuple[float, float]] = {
    "rowwise": (5.0, np.inf),
    "blockwise": (3.0, 128),
    "mxfp8": (3.0, 32),
    "nvfp4": (5.0, 16),
}
SCALED_RATE = 0.92  # of products with several scales


def multiplies_in_float8(linear: LinearShape, choice: Float8Choice) -> bool:
    """Whether `choice` uses float8 for this linear; never for experts, routers and transposed matrices."""
    is_linear = linear.role not in ("expert", "router") and not linear.is_transposed
    return is_linear and takes_float8(linear.in_features, linear.out_features, choice)


def experts_in_float8(linear: LinearShape, columns: Columns) -> Bools:
    """Plans in which this linear of experts has float8 matmuls."""
    fits = takes_float8(linear.in_features, linear.out_features, "all")
    return (columns.float8_experts > 0) & (linear.role == "expert") & fits


def has_float8(device: Device) -> bool:
    return RATE in device.rates


def why_no_float8(request: Request) -> str:
    """Why float8 matmuls cost as much as others on this device, or ''. GPUs without them are refused instead."""
    if has_float8(request.cluster.device) or not request.is_cpu:
        return ""
    return "a CPU has no float8 matmuls: it multiplies rounded values in its own format, and rounding costs time"


@dataclass(frozen=True)
class QuantiseBytes:
    """Bytes moved by the passes around the three matmuls of one linear."""

    forward: Floats
    backward: Floats


def rate_share(device: Device, columns: Columns) -> Floats:
    """The rate of products by the plans' recipes, of that of products with one scale.

    An emulated recipe multiplies restored values in float32.
    """
    share = np.where(np.isin(columns.float8_recipe, [RECIPES.index(one) for one in WHOLE]), 1.0, SCALED_RATE)
    if not has_float8(device):
        return share
    wide = _best(device, "float32") / _best(device, RATE)
    return np.where(np.isin(columns.float8_recipe, [RECIPES.index(one) for one in EMULATED]), wide, share)


def _best(device: Device, rate: str) -> float:
    return device.peak_flops[rate] * device.rates[rate].best


def quantise_bytes(columns: Columns, *, rows: Floats, inner: Floats, outer: Floats) -> QuantiseBytes:
    """Bytes for a matmul [rows, inner] x [inner, outer]; a weight gathered in float8 is quantised already."""
    is_compiled = (columns.compiled > 0) & (columns.float8_recipe != RECIPES.index("delayed"))
    each = np.where(is_compiled, QUANTISED_COMPILED, QUANTISED_EAGER)
    transposed = np.where(is_compiled, TRANSPOSED_COMPILED, TRANSPOSED_EAGER)
    inputs, weights, outputs = rows * inner, inner * outer, rows * outer
    arrives = (columns.float8 > 0) & (columns.shards > 1)
    forward = each * (inputs + np.where(arrives, 0.0, weights))
    backward = each * outputs + transposed * (outputs + inputs + weights)
    for recipe, (passes, elements) in _PASSES.items():
        is_of = columns.float8_recipe == RECIPES.index(recipe)
        scaled = np.where(is_compiled, passes, QUANTISED_EAGER) + SCALE_BYTES / elements
        forward = np.where(is_of, scaled * (inputs + weights), forward)
        moved = scaled * (2 * outputs + inputs + weights) + np.where(is_compiled, 0.0, TRANSPOSED_EAGER) * (
            outputs + inputs + weights
        )
        backward = np.where(is_of, moved, backward)
    return QuantiseBytes(forward=forward, backward=backward)
