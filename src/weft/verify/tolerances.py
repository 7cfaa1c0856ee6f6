"""How far a right result may be from the reference, and why. Every bound of the verifier is made here.

The yardstick is measured, not guessed: the same plain loop runs in float64 (the truth) and in the plan's own precision,
and the distance between the two is what rounding does to this very quantity in this very model. A layout only changes
the order of sums, so it may be a few such distances away. The floors cover quantities whose measured distance is zero
by chance; they follow from the number format alone.
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
}

# Two runs that only differ in the order of sums are each about one measured distance from the truth, in independent
# directions. In 50 runs (seeds, models, plans, precisions) and ten families under every plan of 1 and 2 ranks no right
# quantity used more than 0.46 of what is allowed; half of the runs stayed within 0.06, which is one measured distance.
SLACK = 16.0

# A sum of n terms has a relative error of about sqrt(n) roundings when they are independent. Losses and norms sum
# millions of products in float32 at the end, whatever the compute format.
SUM_ROUNDINGS = 64.0

# Adam divides by the gradient's own size: a weight whose gradient is rounding noise moves by the full rate in a
# direction that is noise too. One such element in four million is let pass, measured against the whole update.
NOISE_SHARE = 1e-3

# A tensor this much smaller than the others of its set is rounding noise of the sums it came from (the gradient of a
# key bias, which is zero in exact arithmetic).
SMALL_SCALE = 1e-3

# Two runs of one low precision part when a float32 difference of one rounding makes a weight, or an 8-bit code, round
# the other way: a fresh draw of a part of the rounding errors. How many flip is chance, so a single pair of references
# may show none. After the first update this multiple of the whole rounding error is allowed, and where that happens to
# be nothing, a part of one rounding. It was chosen after seeing about 0.6 among 50 runs; 16 more seeds bore it out.
# Up to the first update nothing of it is allowed: there the comparison is one of float32 sums.
FLIPPED_SHARE = 2.0
SCALAR_FLIP, TENSOR_FLIP = 2.0**-5, 1.0
CODE_ROUNDOFF = 2.0**-9  # of an 8-bit moment, in the upper decade of its block

# Tensor-parallel ranks round the terms of a sum to the compute format before they add them, which one process does not:
# in low precision a run parts from one process at once, by a fresh draw of rounding errors, and after the first update
# by weights whose gradient is noise, which Adam moves by the full rate either way. The shares are the least that
# rounding is taken to do: of a roundoff in a first loss or norm; of the value in later ones; of the update in a weight.
# Chosen after seeing single flips in models of 32 features (0.09 of the update of a tensor, 1% of a later norm); they
# say nothing of float32, where the same plans are held to sums in another order and nothing else.
TERM_DRAWS = 2.0  # of a first gradient's own rounding error, in multiples of what a flip after an update is allowed
TERM_SHARE, TERM_LOSS, TERM_NORM, TERM_UPDATE = 2.0**-7, 2.0**-13, 2.0**-9, 0.25
# A first norm is further from the truth than a first loss: up to 1.1 roundoffs, and by chance one process is not.
TERM_FIRST_NORM = 2.0**-4

# Rounding errors point anywhere, a wrong scale points along the gradient. Of 120 runs with such roundings (compiled or
# cut models, with and without experts) none was further along the gradient than 0.46 of how far it was across. On a
# GPU one of 72 was, by 0.66: a token that went to other experts, with all of its gradient.
ALONG_SHARE, ROUTED_ALONG = 0.5, 1.0

# Compiled blocks leave out roundings that one process makes between operators: the same allowance. A fused loss rounds
# as its reference does, but in a softmax of its own: single gradients of logits flip, before any update. That moved the
# norm by 0.04 roundoffs at most in 36 runs on a CPU, by 0.2 in 48 on a GPU (a cap by tanh: 0.2 of how far across).
FLIPPED_ALONG = 0.25

# A router's choice is not continuous: in low precision a token whose experts score alike goes to one or the other, and
# with it its whole gradient. Seldom enough that a pair of references shows none (one of 50 runs here), so after the
# first update models with experts are allowed this share of how far training has moved a tensor.
ROUTED_SHARE = 0.1

# An update judged from its own gradients, element by element: what rests in bfloat16 is the number that float64 and the
# known random bits give, or one step of the format beside it where float32 arithmetic fell on the other side of the
# threshold. That is a few in 2^16 (0 to 8e-5 in a dozen runs); rounding to nearest, or by other bits, is every third.
LOW_STEP = 2.0**-7  # of bfloat16, relative to a number at the lower end of its binade
LOW_FLIPPED_SHARE = 2e-3


@dataclass(frozen=True, kw_only=True)
class Bound:
    """An allowed absolute difference, with the measured part and the part that follows from the format."""

    measured: float
    floor: float

    @property
    def allowed(self) -> float:
        return SLACK * self.measured + self.floor

    def share(self, difference: float) -> float:
        """How much of what is allowed a difference uses."""
        return difference / self.allowed if self.allowed > 0 else 0.0 if difference == 0 else float("inf")


def scalar_bound(*, truth: float, same_precision: float, distance: float, drift: float = 0.0) -> Bound:
    """For a loss or a norm: they are accumulated in float32 under every policy. `distance` is from `envelope`."""
    floor = SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] * max(abs(truth), abs(same_precision))
    return Bound(measured=distance, floor=floor + drift)


@dataclass(frozen=True, kw_only=True)
class RoundingAllowance:
    """How far right runs part at least, relatively: at once, in later losses and norms, of the update of a weight."""

    first: float = 0.0
    first_norm: float = 0.0
    loss: float = 0.0
    norm: float = 0.0
    update: float = NOISE_SHARE
    along: float = 0.0  # the gradient, of how far first gradients are apart across it

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
    """Of ranks that round the terms of a sum to `compute`."""
    roundoff = UNIT_ROUNDOFF[compute]
    return RoundingAllowance(
        first=TERM_SHARE * roundoff,
        first_norm=TERM_FIRST_NORM * roundoff,
        loss=TERM_LOSS,
        norm=TERM_NORM,
        update=TERM_UPDATE,
        along=along,
    )


def flipped_terms(compute: str) -> RoundingAllowance:
    """Of a fused loss alone: the roundings of one process, but for single ones that flip."""
    parting = rounded_terms(compute, along=FLIPPED_ALONG)
    return replace(parting, first_norm=parting.first)


def parted_norm_bound(*, size: float, gap: float, along: float, parting: RoundingAllowance, roundoff: float) -> Bound:
    """For the first norm of a run that parts from one process at once. `gap` is the distance of all their gradients,
    `along` the difference of their norms; `roundoff` that of the coarsest format."""
    across = math.sqrt(max(0.0, gap**2 - along**2))
    floor = (SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] + SCALAR_FLIP * roundoff) * size
    return Bound(measured=parting.first * size, floor=floor + parting.along * across)


def envelope(
    truth: Sequence[float], same_precision: Sequence[float], *, least: tuple[float, float] = (0.0, 0.0)
) -> list[float]:
    """The distance of two series at each step, never relatively smaller than at a step before, nor than `least`:
    of the first value, and of the later ones.

    Two curves may cross, and their distance at that one step be nothing by chance; rounding does not get less.
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
    """For a gradient, weight or state tensor, all as 2-norms.

    `distance` is truth against the same precision, `norm` the truth's own, `update` how far training moved it (zero for
    gradients), `scale` the norm of the whole set over the square root of its tensors: below that, noise is no news.
    """
    sums = SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"]  # whatever the format, sums are kept in float32
    floor = max(UNIT_ROUNDOFF[dtype], sums) * (norm + SMALL_SCALE * scale) + noise_share * update
    return Bound(measured=distance, floor=floor + drift)


def scalar_drift(*, distance: float, size: float, roundoff: float) -> float:
    """How far two right runs of one low precision may part after an update; `distance` is that of one to the truth."""
    return FLIPPED_SHARE * distance + SCALAR_FLIP * roundoff * size


def tensor_drift(*, distance: float, norm: float, roundoff: float, routed_update: float = 0.0) -> float:
    """The same for a tensor, in 2-norms; `routed_update` is how far training moved it, where experts are chosen."""
    return FLIPPED_SHARE * distance + TENSOR_FLIP * roundoff * norm + ROUTED_SHARE * routed_update
