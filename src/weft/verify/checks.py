"""Checks with a bound: evidence against the reference, one function per check. Each names the first wrong value.

`truth` is the float64 reference, `same` the one-process run in the plan's own precision, `found` the plan's evidence.
Checks without a bound (dtypes, rows, replicas) are in `facts`, of collectives in `planned`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from weft.verify.run_trace import RunTrace, Tensors
from weft.verify.tolerances import NOISE_SHARE, Bound, envelope, scalar_bound, tensor_bound
from weft.verify.verdict import Check, Finding, Worst

Coordinates = Callable[[int], str]
Block = tuple[tuple[int, int], ...]  # the begin and end of a rank's elements in each dimension; () without elements


def check_scalars(
    name: str,
    truth: Sequence[float],
    same: Sequence[float],
    found: Sequence[float],
    *,
    rule: int,
    steps: Sequence[int] | None = None,
    drifts: Sequence[float] | None = None,
    least: tuple[float, float] = (0.0, 0.0),
) -> Check:
    """Check a series of losses or norms, step by step; `steps` gives their numbers if they are not 1, 2, 3, ….

    `drifts` is added to the bound of each value; for `least` see `envelope`.
    """
    if len(found) != len(truth):
        finding = Finding(rule=rule, expected=f"{len(truth)} values", found=f"{len(found)} values")
        return Check.failed(name, finding)
    worst = margin = 0.0
    numbers, extra = steps or range(1, len(truth) + 1), drifts or [0.0] * len(truth)
    distances = envelope(truth, same, least=least)
    for step, right, rounded, value, distance, drift in zip(numbers, truth, same, found, distances, extra, strict=True):
        bound = scalar_bound(truth=right, same_precision=rounded, distance=distance, drift=drift)
        check = check_scalar(name, right, value, bound, rule=rule, step=step)
        if not check.ok:
            return check
        worst, margin = max(worst, abs(value - right)), max(margin, check.margin)
    return Check.passed(name, f"{len(truth)} values, largest difference {worst:.1e}", margin=margin)


def check_scalar(name: str, right: float, value: float, bound: Bound, *, rule: int, step: int) -> Check:
    difference = abs(value - right)
    if not difference <= bound.allowed:  # NaN is never within a bound
        return Check.failed(name, Finding(rule=rule, step=step, expected=_near(right, bound), found=f"{value:.9g}"))
    return Check.passed(name, f"differs by {difference:.1e}", margin=bound.share(difference))


def check_tensors(
    name: str,
    truth: Tensors,
    same: Tensors,
    found: Tensors,
    *,
    rule: int,
    dtype: str,
    initial: Tensors | None = None,
    step: int | None = None,
    owners: Mapping[str, Sequence[Block]] | None = None,
    describe_rank: Coordinates | None = None,
    drifts: Mapping[str, float] | None = None,
    noise_share: float = NOISE_SHARE,
) -> tuple[Check, Worst]:
    """Check every tensor by the 2-norm of its difference; missing and extra tensors fail too.

    `drifts` is added to the bound of each tensor, by name.
    """
    for key in sorted(set(truth) ^ set(found)):
        what = ("a value", "none") if key in truth else ("none", "a value")
        return Check.failed(name, Finding(rule=rule, step=step, parameter=key, expected=what[0], found=what[1])), Worst(
            parameter=key, rel_diff=math.inf
        )
    scale = math.sqrt(sum(norm_of(value) ** 2 for value in truth.values()) / max(1, len(truth)))
    worst, wrong, margin = Worst(), None, 0.0
    for key, right in truth.items():
        difference = distance_of(found[key], right)
        update = distance_of(right, initial[key]) if initial and key in initial else 0.0
        distance, drift = distance_of(same[key], right), drifts[key] if drifts else 0.0
        bound = tensor_bound(
            distance=distance, norm=norm_of(right), update=update, scale=scale, dtype=dtype, drift=drift,
            noise_share=noise_share,
        )  # fmt: skip
        relative = difference / (norm_of(right) or 1.0)
        relative = math.inf if math.isnan(relative) else relative
        margin = max(margin, bound.share(difference))
        if relative > worst.rel_diff:
            worst = Worst(parameter=key, rel_diff=relative)
        if wrong is None and not difference <= bound.allowed:
            wrong = _tensor_finding(
                key, found[key], right, bound, rule=rule, step=step, owners=owners, describe=describe_rank
            )
    if wrong is not None:
        return Check.failed(name, wrong), worst
    return Check.passed(
        name, f"{len(truth)} tensors, worst {worst.parameter} {worst.rel_diff:.1e}", margin=margin
    ), worst


def check_same_bits(name: str, first: RunTrace, second: RunTrace, *, rule: int, detail: str) -> Check:
    """Check that two runs are equal in every bit."""
    for what, left, right in (("loss", first.losses, second.losses), ("gradient norm", first.norms, second.norms)):
        for step, (expected, value) in enumerate(zip(left, right, strict=True), start=1):
            if expected != value and not (math.isnan(expected) and math.isnan(value)):
                finding = Finding(rule=rule, step=step, expected=f"{what} {expected!r}", found=repr(value))
                return Check.failed(name, finding)
    for what, tensors, others in (("", first.weights, second.weights), ("optim ", first.optimizer, second.optimizer)):
        for key, expected_tensor in tensors.items():
            if key not in others or not torch.equal(expected_tensor, others[key]):
                finding = Finding(rule=rule, parameter=f"{what}{key}", expected="the same bits", found="other bits")
                return Check.failed(name, finding)
    return Check.passed(name, detail)


def worst_scalars(truth: Sequence[float], found: Sequence[float], *, relative: bool) -> float:
    pairs = zip(truth, found, strict=False)
    gaps = [abs(b - a) / (abs(a) or 1.0) if relative else abs(b - a) for a, b in pairs]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps, default=0.0)


def _tensor_finding(
    key: str,
    found: torch.Tensor,
    right: torch.Tensor,
    bound: Bound,
    *,
    rule: int,
    step: int | None,
    owners: Mapping[str, Sequence[Block]] | None,
    describe: Coordinates | None,
) -> Finding:
    """The element with the largest difference, and the rank that holds it."""
    if found.shape != right.shape:
        return Finding(
            rule=rule, step=step, parameter=key, expected=f"shape {tuple(right.shape)}", found=str(tuple(found.shape))
        )
    gap = (found.double() - right.double()).abs().nan_to_num(nan=math.inf)
    flat = int(gap.argmax())
    index = tuple(int(part) for part in torch.unravel_index(torch.tensor(flat), right.shape)) if right.ndim else ()
    owner = owner_of(owners.get(key) if owners else None, index)
    place = f"element {list(index)}"
    if owner is not None and describe is not None:
        place += f" on {describe(owner)}"
    norm = norm_of(right) or 1.0
    return Finding(
        rule=rule,
        step=step,
        parameter=key,
        coordinates=place,
        expected=f"{right.flatten()[flat].item():.6g} (full tensor within {bound.allowed / norm:.1e} of its norm)",
        found=f"{found.flatten()[flat].item():.6g} (off by {distance_of(found, right) / norm:.1e})",
    )


def owner_of(blocks_by_rank: Sequence[Block] | None, index: Sequence[int]) -> int | None:
    """The first rank that holds the element; `index` may be of the first dimensions only."""
    for rank, block in enumerate(blocks_by_rank or ()):
        if block and all(begin <= at < end for at, (begin, end) in zip(index, block, strict=False)):
            return rank
    return None


def norm_of(tensor: torch.Tensor) -> float:
    return float(tensor.double().norm())


def distance_of(first: torch.Tensor, second: torch.Tensor) -> float:
    if first.shape != second.shape:
        return math.inf
    return float((first.double() - second.double()).norm())


def _near(value: float, bound: Bound) -> str:
    return f"{value:.9g} within {bound.allowed:.1e}"
