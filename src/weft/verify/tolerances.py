"""Allowed difference between a correct result and the reference, with reasons. All bounds of the verifier are here.

Bounds are measured: the same plain loop runs in float64 (the truth) and in the plan's own precision, and the distance
between the two is the effect of rounding on this quantity in this model. A layout only changes the order of sums, so it
may be a few such distances away. Floors cover quantities whose measured distance is zero by chance; they follow from
the number format alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Unit roundoff: half the gap between 1 and the next number of the format.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "bfloat16": 2.0**-9,
    "float16": 2.0**-11,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3": 2.0**-4,
    "int8": 2.0**-8,  # of the largest magnitude of a block
}

# Two runs that only differ in the order of sums are each about one measured distance from the truth, in independent
# directions. In 50 runs (seeds, models, plans, precisions) and ten families under every plan of 1 and 2 ranks no
# correct quantity used more than 0.46 of its bound; half of the runs stayed within 0.06, one measured distance.
SLACK = 16.0

# A sum of n terms has a relative error of about sqrt(n) roundings if they are independent. Losses and norms sum
# millions of products in float32 at the end, whatever the compute dtype.
SUM_ROUNDINGS = 64.0

# Adam divides by the gradient's own size: a weight whose gradient is rounding noise moves by the full rate in a
# direction that is noise too. One such element in four million is allowed, measured against the full update.
NOISE_SHARE = 1e-3

# A tensor this much smaller than the others of its set is rounding noise of the sums it came from (the gradient of a
# key bias, which is zero in exact arithmetic).
SMALL_SCALE = 1e-3

# Two runs in the same low precision diverge when a float32 difference of one rounding makes a weight, or an 8-bit code,
# round the other way: some of the rounding errors are drawn anew. The number of flips is random, so a single pair of
# references may show none. After the first update this multiple of the total rounding error is allowed, and where that
# happens to be zero, a fraction of one rounding. It was chosen after about 0.6 in 50 runs; 16 more seeds confirmed it.
# Before the first update none is allowed: there only float32 sums differ.
FLIPPED_SHARE = 2.0
SCALAR_FLIP, TENSOR_FLIP = 2.0**-5, 1.0
CODE_ROUNDOFF = 2.0**-9  # of an 8-bit moment, in the upper decade of its block

# Tensor-parallel ranks round the terms of a sum to the compute dtype before they add them; one process does not. In low
# precision a run differs from one process from the start, by other rounding errors, and after the first update by
# weights whose gradient is noise, which Adam moves by the full rate in either direction. The shares are the least
# allowed effect of rounding: of a roundoff in a first loss or norm; of the value in later ones; of the update in a
# weight. Chosen after single flips in models of 32 features (0.09 of the update of a tensor, 1% of a later norm). They
# do not apply to float32, where the same plans may only sum in another order.
TERM_DRAWS = 2.0  # rounding error of a first gradient, in multiples of the allowance for a flip after an update
TERM_SHARE, TERM_LOSS, TERM_NORM, TERM_UPDATE = 2.0**-7, 2.0**-13, 2.0**-9, 0.25
# A first norm is further from the truth than a first loss: up to 1.1 roundoffs, where one process may have none.
TERM_FIRST_NORM = 2.0**-4

# Rounding errors have any direction, a wrong scale has the gradient's. In 120 runs with such roundings (compiled or
# tensor-parallel models, with and without experts) the difference along the gradient was at most 0.46 of the difference
# across it. On a GPU it was 0.66 in one of 72: a token went to other experts, with its full gradient.
ALONG_SHARE, ROUTED_ALONG = 0.5, 1.0

# Compiled blocks skip roundings that one process makes between operators: the same allowance. A fused loss rounds as
# its reference does, but in its own softmax: single logit gradients flip before any update. That changed the norm by at
# most 0.04 roundoffs in 36 runs on a CPU, by 0.2 in 48 on a GPU (with a tanh cap: 0.2 of the difference across).
FLIPPED_ALONG = 0.25

# A router's choice is not continuous: in low precision a token with nearly equal expert scores goes to one or the other
# expert, with its full gradient. It is too rare for a pair of references to show (one of 50 runs here), so after the
# first update models with experts are allowed this share of the distance that training has moved a tensor.
ROUTED_SHARE = 0.1

# An update recomputed from its own gradients, element by element: a bfloat16 value is the number that float64 and the
# known random bits give, or one step of the format beside it where float32 arithmetic fell on the other side of the
# threshold. That happens to a few in 2^16 (0 to 8e-5 in a dozen runs); with rounding to nearest, or other random bits,
# to every third.
LOW_STEP = 2.0**-7  # of bfloat16, relative to a number at the lower end of its binade
LOW_FLIPPED_SHARE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An allowed absolute difference: a measured distance, and a floor that follows from the number format."""

    measured: float
    floor: float

    @property
    def allowed(self) -> float:
        return SLACK * self.measured + self.floor

    def share(self, difference: float) -> float:
        """A difference as a fraction of the allowed one."""
        return difference / self.allowed if self.allowed > 0 else 0.0 if difference == 0 else float("inf")


def scalar_bound(*, truth: float, same_precision: float, distance: float, drift: float = 0.0) -> Bound:
    """Bound of a loss or norm: both are accumulated in float32 under every policy. `distance` is from `envelope`."""
    floor = SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] * max(abs(truth), abs(same_precision))
    return Bound(measured=distance, floor=floor + drift)


@dataclass(frozen=True, kw_only=True)
class RoundingAllowance:
    """Least relative difference allowed between correct runs: in first values, in later ones, in a weight's update."""

    first: float = 0.0
    first_norm: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    update: float = NOISE_SHARE
    along: float = 0.0  # difference along the first gradient, as a fraction of the difference across it

    @property
    def is_at_once(self) -> bool:
        return self.first > 0

    @property
    def losses(self) -> tuple[float, float]:
        return self.first, self.loss

    @property
    def norms(self) -> tuple[float, float]:
        return self.first_norm, self.norm


def rounded_terms(compute: str, *, along: float) -> RoundingAllowance:
    """Allowance for ranks that round the terms of a sum to `compute`."""
    roundoff = UNIT_ROUNDOFF[compute]
    return RoundingAllowance(
        first=TERM_SHARE * roundoff,
        first_norm=TERM_FIRST_NORM * roundoff,
        loss=TERM_LOSS,
        norm=TERM_NORM,
        update=TERM_UPDATE,
        along=along,
    )


def coded_terms(weights: str, gradients: str, *, along: float) -> RoundingAllowance:
    """Allowance where numbers travel as codes, whose blocks are those of a layout. A loss before any update has the
    roundings of the formats of weights alone, gradients have all."""
    coarse = max(weights, gradients, key=UNIT_ROUNDOFF.__getitem__)
    return replace(rounded_terms(coarse, along=along), first=TERM_SHARE * UNIT_ROUNDOFF[weights])


def flipped_terms(compute: str) -> RoundingAllowance:
    """Allowance for a fused loss alone: the roundings of one process, except for single flips."""
    allowance = rounded_terms(compute, along=FLIPPED_ALONG)
    return replace(allowance, first_norm=allowance.first)


def first_norm_bound(*, size: float, gap: float, along: float, allowance: RoundingAllowance, roundoff: float) -> Bound:
    """Bound of the first norm of a run that differs from one process from the start. `gap` is the distance of all their
    gradients, `along` the difference of their norms; `roundoff` that of the coarsest dtype."""
    across = math.sqrt(max(0.0, gap**2 - along**2))
    floor = (SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] + SCALAR_FLIP * roundoff) * size
    return Bound(measured=allowance.first * size, floor=floor + allowance.along * across)


def envelope(
    truth: Sequence[float], same_precision: Sequence[float], *, least: tuple[float, float] = (0.0, 0.0)
) -> list[float]:
    """The distance of two series at each step, relatively never smaller than at an earlier step, nor than `least` (of
    the first value, of the later values).

    Two curves may cross and have no distance at that step by chance; the effect of rounding does not shrink.
    """
    relative, distances = least[0], []
    for right, rounded in zip(truth, same_precision, strict=True):
        size = max(abs(right), abs(rounded))
        relative = max(relative, abs(right - rounded) / size if size > 0 else 0.0)
        distances.append(relative * size)
        relative = max(relative, least[1])
    return distances


def tensor_bound(
    *,
    distance: float,
    norm: float,
    update: float,
    scale: float,
    dtype: str,
    drift: float = 0.0,
    noise_share: float = NOISE_SHARE,
) -> Bound:
    """Bound of a gradient, weight or state tensor, all as 2-norms.

    `distance` is from the truth to the same precision, `norm` the truth's own, `update` the distance that training
    moved it (zero for gradients), `scale` the norm of the full set over the square root of its number of tensors: far
    smaller tensors are noise.
    """
    sums = SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"]  # sums are float32 in every precision
    floor = max(UNIT_ROUNDOFF[dtype], sums) * (norm + SMALL_SCALE * scale) + noise_share * update
    return Bound(measured=distance, floor=floor + drift)


def scalar_drift(*, distance: float, size: float, roundoff: float) -> float:
    """Extra bound after an update between two correct runs in one low precision; `distance` is of one to the truth."""
    return FLIPPED_SHARE * distance + SCALAR_FLIP * roundoff * size


def tensor_drift(*, distance: float, norm: float, roundoff: float, routed_update: float = 0.0) -> float:
    """The same for a tensor, in 2-norms; `routed_update`: distance that training moved it, in models with experts."""
    return FLIPPED_SHARE * distance + TENSOR_FLIP * roundoff * norm + ROUTED_SHARE * routed_update
