"""The one-process runs that a plan is compared with, each computed once: the truth, and the plan's own precision.

In low precision a third run sums the same numbers in another order: a correct layout may differ from the second run
only by the distance between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.core.plan import Plan
from weft.verify.delayed_reference import Delay, run_delayed
from weft.verify.exercise import Subject, at_rest, joint_split, plan_precision, plan_split
from weft.verify.late_division import is_fused
from weft.verify.near_ties import Perturbation
from weft.verify.reference import run_reference
from weft.verify.run_trace import TRUTH, BatchSplit, Exercise, ReferencePrecision, RunTrace, has_experts
from weft.verify.tolerances import (
    ALONG_SHARE,
    ROUTED_ALONG,
    UNIT_ROUNDOFF,
    RoundingAllowance,
    coded_terms,
    flipped_terms,
    rounded_terms,
)


@dataclass(frozen=True, kw_only=True)
class References:
    truth: RunTrace = field(default_factory=RunTrace)
    same: RunTrace = field(default_factory=RunTrace)
    reordered: RunTrace | None = None  # in low precision only
    allowance: RoundingAllowance = field(default_factory=RoundingAllowance)  # where ranks round the terms of a sum
    perturbed: Callable[[Perturbation], RunTrace] | None = None  # of mixtures: the truth with weights moved at random

    @property
    def evaluation_least(self) -> tuple[float, float]:
        """Least relative uncertainty of the evaluations after the first and the last update. Where runs differ from the
        start, the last one adds the uncertainty of its update: the update's progress times the rounding error of its
        gradient. It is nearly zero except at learning rates that make training unstable."""
        truth, same, least = self.truth, self.same, self.allowance.loss
        if not self.allowance.is_at_once or not truth.norms[-1] or not truth.eval_losses[-1]:
            return least, least
        progress = abs(truth.eval_losses[-1] - truth.losses[-1]) / truth.eval_losses[-1]
        unsure = progress * abs(same.norms[-1] - truth.norms[-1]) / truth.norms[-1]
        return least, max(least, unsure if math.isfinite(unsure) else 0.0)


class ReferenceCache:
    """Traces by exercise, precision and batch split. Rank 0 computes; other ranks hold empty traces."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main
        self._exercises: dict[str, Exercise] = {}
        self._traces: dict[tuple[str, ReferencePrecision, BatchSplit | None, Delay | None], RunTrace] = {}
        self._fuses: dict[str, bool] = {}

    def exercise(self, name: str, make: Callable[[], Exercise]) -> Exercise:
        """The exercise of this name, made at its first use."""
        if name not in self._exercises:
            self._exercises[name] = make()
        return self._exercises[name]

    def _precision(self, name: str, subject: Subject, exercise: Exercise, plan: Plan) -> ReferencePrecision:
        """The plan's precision; `divides_last` only if the engine can fuse the loss of this model."""
        precision = plan_precision(plan, subject.run.train)
        if precision.divides_last and name not in self._fuses:
            self._fuses[name] = is_fused(subject.build(), exercise.batches[0])
        return replace(precision, divides_last=precision.divides_last and self._fuses[name])

    def first_step(self, name: str, subject: Subject, make: Callable[[], Exercise], plan: Plan) -> RunTrace:
        """The first step alone, in the plan's precision and batch split."""
        exercise, split = self.exercise(name, make), plan_split(plan, subject.run)
        precision = self._precision(name, subject, exercise, plan)
        exercise = at_rest(exercise, precision)
        one = replace(exercise, batches=exercise.batches[:1], rates=exercise.rates[:1], evaluation=())
        key = (f"{name}, one step", precision, split, None)
        if key not in self._traces:
            self._traces[key] = run_reference(subject.build, one, precision, split)
        return self._traces[key]

    def references(
        self, name: str, subject: Subject, make: Callable[[], Exercise], plan: Plan, *, tight: bool = False
    ) -> References:
        """`tight` adds the reordered run in low precision."""
        if not self._is_main:
            return References()
        exercise, split = self.exercise(name, make), plan_split(plan, subject.run)
        precision = self._precision(name, subject, exercise, plan)
        exercise = at_rest(exercise, precision)
        begins = f"in {precision.compute}" if precision.rounds_weights or exercise.rests_low else ""
        delay = Delay.of(plan, subject.skeleton())

        def trace(precision: ReferencePrecision, split: BatchSplit) -> RunTrace:
            is_any = precision is TRUTH and split.ranks == 0  # float64, and no state from chunk to chunk
            key = (f"{name} {begins}", precision, None if is_any else split, delay)
            if key not in self._traces:
                if delay is None:
                    self._traces[key] = run_reference(subject.build, exercise, precision, split)
                else:
                    self._traces[key] = run_delayed(subject.build, exercise, precision, split, delay)
            return self._traces[key]

        def own(split: BatchSplit) -> RunTrace:
            """The plan's own precision, with the first gradients of weights as they were before they travelled."""
            found = trace(precision, split)
            if precision.gather is None:
                return found
            exact = trace(replace(precision, gather=None), split)
            return replace(found, first_gradients=exact.first_gradients)

        def perturbed(perturbation: Perturbation) -> RunTrace:
            return run_reference(subject.build, exercise, TRUTH, split, perturbation=perturbation)

        if trace(TRUTH, split).buffers:
            split = joint_split(plan, subject.run)
        return References(
            truth=trace(TRUTH, split),
            same=own(split),
            reordered=own(replace(split, is_reordered=True)) if tight and precision.is_low else None,
            allowance=_allowance(plan, precision, exercise),
            perturbed=perturbed if has_experts(exercise) and delay is None else None,
        )


def _allowance(plan: Plan, precision: ReferencePrecision, exercise: Exercise) -> RoundingAllowance:
    """The allowance of plans that round differently from one process from the first step on. bfloat16 gradients are
    summed over micro-batches in bfloat16: rounded terms, as in tensor parallelism, or as sums over experts."""
    along = ROUTED_ALONG if has_experts(exercise) else ALONG_SHARE
    has_own_loss = precision.divides_last or exercise.objective.reads_logits  # of another softmax than the reference's
    if precision.has_float8:  # another order of a float32 sum makes an operand round the other way
        return rounded_terms("float8_e4m3fn", along=along)
    is_float32, compute = precision.compute == precision.master, str(precision.compute).removeprefix("torch.")
    if precision.has_codes:
        weights = max(compute, precision.gather or compute, key=UNIT_ROUNDOFF.__getitem__)
        return coded_terms(weights, precision.reduce, along=along)
    if precision.rounds_weights or (
        not is_float32 and (max(plan.mesh.tp, plan.mesh.cp, plan.mesh.ep) > 1 or plan.compile.enabled)
    ):
        return rounded_terms(compute, along=along)
    return flipped_terms(compute) if not is_float32 and has_own_loss else RoundingAllowance()
