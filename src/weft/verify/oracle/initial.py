"""Checks initial weights against transformers' own: the same model initialised a few times from other seeds.

An element that is equal in all draws (a norm's one, a bias's zero, a padding row) must have that value. For
the others, mean and standard deviation of each parameter must be those of the draws, within statistical error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.verify.oracle.facts import Tensors
from weft.verify.oracle.model import build_plain
from weft.verify.verdict import Check, Finding

NAME, RULE = "oracle initial", 12
PRETRAINED = "oracle pretrained"
NUM_DRAWS, FEWER_DRAWS, LARGE = 6, 2, 20_000_000
ERRORS = 8.0  # standard errors; in a thousand runs of a thousand parameters all are within six
SCATTER = 6.0  # the same for correlated elements, in deviations between the draws
LEAST_ELEMENTS = 32


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one parameter over the draws; `fixed` marks elements that are equal in all, `values` has them."""

    shape: torch.Size
    fixed: torch.Tensor
    values: torch.Tensor
    mean: float = 0.0
    deviation: float = 0.0
    mean_error: float = 0.0
    deviation_error: float = 0.0
    is_blank: bool = False  # transformers leaves it uninitialised


def draw_statistics(config: Any, *, has_scores: bool = False) -> dict[str, Statistics]:
    size = sum(parameter.numel() for parameter in build_plain(config, seed=0).parameters())
    num_draws = NUM_DRAWS if size < LARGE else FEWER_DRAWS
    draws = [_draw(config, seed=100 + index, has_scores=has_scores) for index in range(num_draws)]
    return {name: _statistics([draw[name] for draw in draws]) for name in draws[0]}


def _draw(config: Any, *, seed: int, has_scores: bool) -> dict[str, torch.Tensor]:
    """Parameters of a fresh model; uninitialised memory is NaN (torch's deterministic mode)."""
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return {name: value.detach() for name, value in _named(config, seed, has_scores)}
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _named(config: Any, seed: int, has_scores: bool) -> Any:
    return build_plain(config, seed=seed, has_scores=has_scores).named_parameters()


def _statistics(draws: list[torch.Tensor]) -> Statistics:
    stack = torch.stack(draws).double()
    fixed = (stack == stack[0]).all(dim=0)
    made = Statistics(shape=draws[0].shape, fixed=fixed, values=draws[0], is_blank=not stack.isfinite().all().item())
    if made.is_blank:
        return made
    free = stack[:, ~fixed]
    count = free.shape[1] if free.ndim > 1 else 0
    if count < LEAST_ELEMENTS:
        return made
    mean, deviation = free.mean().item(), free.std().item()
    kurtosis = ((free - mean) / deviation).pow(4).mean().item()
    more = 1.0 + 1.0 / len(draws)
    by_count = math.sqrt(more / count)
    scatter = [value.item() for value in (free.mean(dim=1).std(), free.std(dim=1).std())]
    return replace(
        made,
        mean=mean,
        deviation=deviation,
        mean_error=max(ERRORS * deviation * by_count, SCATTER * scatter[0]),
        deviation_error=max(
            ERRORS * deviation * by_count * math.sqrt(max(kurtosis - 1, 1.0)) / 2, SCATTER * scatter[1]
        ),
    )


def check_initial(expected: Mapping[str, Statistics], found: Tensors, *, without_rule: frozenset[str]) -> Check:
    for name in sorted(set(expected) ^ set(found)):
        what = ("a parameter", "none") if name in expected else ("none (it may be tied)", "a parameter")
        return Check.failed(NAME, Finding(rule=RULE, parameter=name, expected=what[0], found=what[1]))
    left_out = [name for name in expected if expected[name].is_blank or name in without_rule]
    for name, statistics in expected.items():
        wrong = None if name in left_out else _wrong(name, statistics, found[name])
        if wrong is not None:
            return Check.failed(NAME, wrong)
    detail = f"{len(expected) - len(left_out)} parameters as transformers draws them: constants, means, deviations"
    return Check.passed(NAME, detail + (f"; {len(left_out)} have no rule there, not judged" if left_out else ""))


def _wrong(name: str, expected: Statistics, found: torch.Tensor) -> Finding | None:
    def finding(right: str, value: str) -> Finding:
        return Finding(rule=RULE, parameter=name, expected=right, found=value)

    if expected.shape != found.shape:
        return finding(f"shape {tuple(expected.shape)}", str(tuple(found.shape)))
    fixed = expected.fixed
    other = (found != expected.values) & fixed
    if other.any():
        at = int(other.flatten().nonzero()[0])
        values = expected.values.flatten()[at].item(), found.flatten()[at].item()
        return finding(f"{values[0]:.6g} at element {at}, in every draw", f"{values[1]:.6g}")
    free = found[~fixed].double()
    if expected.deviation == 0.0 or free.numel() < LEAST_ELEMENTS:
        return None
    mean, deviation = free.mean().item(), free.std().item()
    if not abs(deviation - expected.deviation) <= expected.deviation_error:
        right = f"a standard deviation of {expected.deviation:.5g} within {expected.deviation_error:.1e}"
        return finding(right, f"{deviation:.5g}")
    if not abs(mean - expected.mean) <= expected.mean_error:
        return finding(f"a mean of {expected.mean:.5g} within {expected.mean_error:.1e}", f"{mean:.5g}")
    return None


def check_pretrained(path: str, found: Tensors) -> Check:
    """Compare the weights of a folder bit by bit with those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=False)
    named = dict(model.named_parameters())
    for name in sorted(set(named) ^ set(found)):
        what = ("a parameter", "none") if name in named else ("none", "a parameter")
        return Check.failed(PRETRAINED, Finding(rule=RULE, parameter=name, expected=what[0], found=what[1]))
    for name, value in named.items():
        if not torch.equal(value.detach().float(), found[name].float()):
            finding = Finding(rule=RULE, parameter=name, expected="the bits of from_pretrained", found="other bits")
            return Check.failed(PRETRAINED, finding)
    return Check.passed(PRETRAINED, f"{len(named)} parameters of {path} as from_pretrained reads them, bit by bit")
