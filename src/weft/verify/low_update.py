"""Optimizer states and weights stored in bfloat16: the expected result of one update; the reference's rounding.

The engine defines the random bits that round an element, as it defines dropout masks; AdamW and rounding are written
here independently. A plan's update is checked from the plan's own gradients and previous states, so that earlier
differences do not matter: it is computed in float64 and rounded by the known bits, and the plan must have these bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from weft.core.parameter_groups import decay_of, ratio_of
from weft.core.run_spec import TrainSpec
from weft.engine.optim.rounding_bits import for_second_moment, for_weight, key_of, random_bits, words_of
from weft.verify.tolerances import LOW_FLIPPED_SHARE, LOW_STEP, SUM_ROUNDINGS, UNIT_ROUNDOFF
from weft.verify.verdict import Check, Finding

Tensors = dict[str, Tensor]
NAME = "rounded updates"
FIRST, SECOND = "exp_avg", "exp_avg_sq"
KINDS = (FIRST, SECOND, "weight")


@dataclass(kw_only=True)
class LowPrecisionStep:
    """One update of a plan, gathered: unclipped gradients, their norm, the resulting weights and states."""

    gradients: Tensors = field(default_factory=dict)
    norm: float = 0.0
    weights: Tensors = field(default_factory=dict)
    states: Tensors = field(default_factory=dict)  # by "<parameter>.<key>"


@dataclass(frozen=True, kw_only=True)
class LowUpdate:
    """Settings of the update."""

    train: TrainSpec
    clip_norm: float
    rates: Sequence[float]
    rounds_moments: frozenset[str]  # names of states
    rounds_weights: bool


def round_low(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], *, seed: int, moments: frozenset[str], weights: bool
) -> None:
    """Round moments and weights after torch's float32 AdamW, as if stored in bfloat16 and read back."""
    for name, parameter in parameters.items():
        if parameter not in optimizer.state:  # never had a gradient
            continue
        state = optimizer.state[parameter]
        bits = bits_of(seed, name, int(state["step"]), parameter.shape).to(parameter.device)
        if FIRST in moments:
            state["exp_avg"].copy_(state["exp_avg"].bfloat16())
        if SECOND in moments:
            state["exp_avg_sq"].copy_(rounded(state["exp_avg_sq"], for_second_moment(bits)))
        if weights:
            parameter.detach().copy_(rounded(parameter.detach(), for_weight(bits)))


def bits_of(seed: int, name: str, step: int, shape: torch.Size) -> Tensor:
    return random_bits(words_of(key_of(seed, name), step), torch.arange(shape.numel()).view(shape))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Stochastic rounding to bfloat16: away from zero where the dropped bits plus the random bits overflow."""
    words = values.view(torch.int32)
    dropped = words & 0xFFFF
    towards_zero = words - dropped
    away = torch.where(dropped + bits >= 2**16, towards_zero + 2**16, towards_zero)
    return away.view(torch.float32)


def check_updates(how: LowUpdate, initial: Tensors, updates: Sequence[LowPrecisionStep]) -> Check:
    """Check every element of the first updates, computed from the plan's own gradients and states."""
    before = LowPrecisionStep(weights=initial)
    worst = 0.0
    for step, update in enumerate(updates, start=1):
        flips = dict.fromkeys(KINDS, 0)
        sizes = dict.fromkeys(KINDS, 0)
        for name, gradient in update.gradients.items():
            right = _right(how, name, gradient, before, step, update.norm)
            for kind, (expected, terms) in right.items():
                found = update.weights[name] if kind == "weight" else update.states[f"{name}.{kind}"]
                finding = _far(found, expected, terms)
                if finding is not None:
                    return Check.failed(NAME, replace(finding, step=step, parameter=f"{name} {kind}"))
                flips[kind] += int((found.double() != expected).sum()) if found.dtype == torch.bfloat16 else 0
                sizes[kind] += found.numel()
        for kind in KINDS:
            share = flips[kind] / max(1, sizes[kind])
            if share > LOW_FLIPPED_SHARE:
                expected_text = f"{kind} rounded by the bits of (seed, name, step, element)"
                found_text = f"{share:.1%} of the elements are rounded differently"
                return Check.failed(NAME, Finding(rule=6, step=step, expected=expected_text, found=found_text))
            worst = max(worst, share / LOW_FLIPPED_SHARE)
        before = update
    return Check.passed(NAME, f"the first {len(updates)}, element by element", margin=worst)


def _right(
    how: LowUpdate, name: str, gradient: Tensor, before: LowPrecisionStep, step: int, norm: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Moments and weight after the update in float64, each with the summed magnitudes of its terms."""
    train = how.train
    rate = how.rates[step - 1] * ratio_of(name, train.groups, peak=train.learning_rate)
    (beta1, beta2), given = train.betas, gradient.double()
    if how.clip_norm > 0:
        given = given * min(1.0, how.clip_norm / (norm + 1e-6))
    zero = torch.zeros((), dtype=torch.float64)
    kept = before.states.get(f"{name}.exp_avg", zero).double() * beta1
    mean, mean_terms = kept + (1 - beta1) * given, kept.abs() + (1 - beta1) * given.abs()
    square = before.states.get(f"{name}.exp_avg_sq", zero).double() * beta2 + (1 - beta2) * given**2
    decay = decay_of(name, train.groups, num_dims=gradient.ndim, weight_decay=train.weight_decay)
    slope = rate / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + train.epsilon)
    began = before.weights[name].double() * (1 - rate * decay)
    weight, weight_terms = began - slope * mean, began.abs() + slope * mean_terms
    bits = bits_of(train.seed, name, step, gradient.shape)
    if FIRST in how.rounds_moments:
        mean = mean.float().bfloat16()
    if SECOND in how.rounds_moments:
        square = rounded(square.float(), for_second_moment(bits))
    if how.rounds_weights:
        weight = rounded(weight.float(), for_weight(bits))
    return {
        "exp_avg": (mean.double(), mean_terms),
        "exp_avg_sq": (square.double(), square.double()),
        "weight": (weight.double(), weight_terms),
    }


def _far(found: Tensor, right: Tensor, terms: Tensor) -> Finding | None:
    """The first element with a larger error than a float32 sum, plus one bfloat16 step if it is stored in bfloat16."""
    gap = (found.double() - right).abs()
    allowed = SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] * terms
    if found.dtype == torch.bfloat16:
        allowed = allowed + LOW_STEP * right.abs()
    wrong = (~(gap <= allowed)).nonzero()
    if not wrong.numel():
        return None
    index = tuple(int(part) for part in wrong[0])
    return Finding(
        rule=6,
        coordinates=f"element {list(index)}, the first of {len(wrong)} wrong ones",
        expected=f"{right[index].item():.6g} within {allowed[index].item():.1e}",
        found=f"{found[index].item():.6g}",
    )
