"""Muon: the constants that planner, engine and documents share. Arithmetic only.

A matrix of a block is updated by its momentum made orthogonal with Newton-Schulz; all other parameters by AdamW. Ranks
that share matrices take them in rounds: matrices in the order of `order_key`, one per rank and round, the first of a
round to the first rank.
"""

from __future__ import annotations

import math
from typing import Literal

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic step: the largest slope at zero
STEPS = 5
EPSILON = 1e-7  # least norm that a matrix is divided by
AXIS = "optimizer"  # of the exchanges, in records of traffic

Scale = Literal["match_rms_adamw", "original"]
Precision = Literal["auto", "bfloat16", "float32"]


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Per step: X X^T, its square, and the product with X."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


def order_key(rows: int, columns: int) -> tuple[int, int, int]:
    """The order of matrices over rounds: those of a round should cost alike."""
    return -newton_schulz_flops(rows, columns), rows, columns


def orthogonal_dtype(precision: Precision, *, is_cpu: bool) -> Literal["bfloat16", "float32"]:
    """The dtype of the iteration and of matrices on their way: auto is float32 on a CPU, which has no fast bfloat16."""
    if precision == "auto":
        return "float32" if is_cpu else "bfloat16"
    return precision


def rate_scale(scale: Scale, rows: int, columns: int) -> float:
    """The rate of a matrix over the run's: the root mean square of AdamW's updates, or the published recipe's."""
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
