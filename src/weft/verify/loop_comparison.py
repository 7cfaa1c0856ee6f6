"""A run of the training loop against one process: its losses, its norms and the weights that it saved.

Where a mixture fails, it may have chosen otherwise for a token whose experts are nearly tied (`near_ties`). It is then
compared, within the same bounds, with runs of one process that did too. A run that passes does not cost them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from weft.verify.checks import check_scalars, check_tensors
from weft.verify.near_ties import runs_that_choose_otherwise
from weft.verify.references import References
from weft.verify.run_trace import RunTrace
from weft.verify.verdict import Check


def against_references(
    name: str, references: References, found: RunTrace, skipped: frozenset[int], *, saved: Collection[str]
) -> Check:
    """Check losses, norms and, if the run saved any, its weights. `saved`: parameters that checkpoints hold."""
    if len(skipped) == len(references.truth.losses):  # the exercise checks the numbers at a lower loss scale
        return Check.passed(name, "every step overflowed float16 at the starting loss scale and was skipped")
    check = _judged(name, references, found, skipped, saved)
    if check.ok or references.perturbed is None:
        return check
    for other, step in runs_that_choose_otherwise(references.truth, references.perturbed):
        again = _judged(name, _beside(references, other), found, skipped, saved)
        if again.ok:
            why = f"{again.detail}; as one process with another choice between nearly tied experts in step {step}"
            return replace(again, detail=why)
    return check


def _beside(references: References, other: RunTrace) -> References:
    """`other` as the truth, and as far from it as before what one process has in the plan's precision."""
    truth, same = references.truth, references.same
    weights = {key: value + (same.weights[key] - truth.weights[key]) for key, value in other.weights.items()}
    losses = _moved(other.losses, truth.losses, same.losses)
    norms = _moved(other.norms, truth.norms, same.norms)
    return replace(references, truth=other, same=replace(same, losses=losses, norms=norms, weights=weights))


def _moved(values: Sequence[float], truth: Sequence[float], same: Sequence[float]) -> list[float]:
    return [value + (near - right) for value, right, near in zip(values, truth, same, strict=True)]


def _judged(
    name: str, references: References, found: RunTrace, skipped: frozenset[int], saved: Collection[str]
) -> Check:
    truth, same, allowance = references.truth, references.same, references.allowance
    losses = check_scalars(name, truth.losses, same.losses, found.losses, rule=1, least=allowance.losses)
    if not losses.ok:
        return losses
    taken = [step for step in range(len(truth.norms)) if step not in skipped]
    norms = check_scalars(
        name, *([trace.norms[step] for step in taken] for trace in (truth, same, found)),
        rule=2, steps=[step + 1 for step in taken], least=allowance.norms,
    )  # fmt: skip
    if not norms.ok or not found.weights:
        return norms
    weights, _ = check_tensors(
        name, {key: truth.weights[key] for key in saved}, same.weights,
        {key: value for key, value in found.weights.items() if key in truth.weights},
        rule=5, dtype="float32", step=len(truth.losses), initial=truth.initial, noise_share=allowance.update,
    )  # fmt: skip
    if not weights.ok:
        return weights
    margin = max(losses.margin, norms.margin, weights.margin)
    return Check.passed(name, f"{len(truth.losses)} steps and the weights it saved", margin=margin)
