"""The one-process courses a plan is held against, each computed once: the truth, and the plan's own precision.

In low precision a third one adds the same numbers in another order: what is left between the two is all that a right
layout may differ by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from weft.core.plan import Plan
from weft.verify.delayed_reference import Delay, run_delayed
from weft.verify.exercise import Subject, at_rest, joint_cut, plan_cut, plan_precision
from weft.verify.late_division import is_fused
from weft.verify.reference import TRUTH, BatchSplit, Exercise, ReferencePrecision, RunTrace, has_experts, run_reference
from weft.verify.tolerances import ALONG_SHARE, ROUTED_ALONG, RoundingAllowance, flipped_terms, rounded_terms


@dataclass(frozen=True, kw_only=True)
class References:
    truth: RunTrace = field(default_factory=RunTrace)
    same: RunTrace = field(default_factory=RunTrace)
    reordered: RunTrace | None = None  # in low precision only
    parting: RoundingAllowance = field(default_factory=RoundingAllowance)  # where ranks round the terms of a sum

    @property
    def evaluation_least(self) -> tuple[float, float]:
        """How far, relatively, evaluations after the first and the last update are unsure at least. Where runs part at
        once, the last is as unsure as its update: that update's progress times what rounding did to its gradient. Next
        to nothing, but at rates that throw a model about."""
        truth, same, least = self.truth, self.same, self.parting.loss
        if not self.parting.is_at_once or not truth.norms[-1] or not truth.eval_losses[-1]:
            return least, least
        progress = abs(truth.eval_losses[-1] - truth.losses[-1]) / truth.eval_losses[-1]
        unsure = progress * abs(same.norms[-1] - truth.norms[-1]) / truth.norms[-1]
        return least, max(least, unsure if math.isfinite(unsure) else 0.0)


class Library:
    """Courses by exercise, precision and cut. Rank 0 computes; the others hold empty ones."""

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main
        self._exercises: dict[str, Exercise] = {}
        self._courses: dict[tuple[str, ReferencePrecision, BatchSplit | None, Delay | None], RunTrace] = {}
        self._fuses: dict[str, bool] = {}

    def exercise(self, name: str, make: Callable[[], Exercise]) -> Exercise:
        """The exercise of that name, made at its first use."""
        if name not in self._exercises:
            self._exercises[name] = make()
        return self._exercises[name]

    def _precision(self, name: str, subject: Subject, exercise: Exercise, plan: Plan) -> ReferencePrecision:
        """The plan's; a loss that the engine cannot fuse divides as any other."""
        precision = plan_precision(plan, subject.run.train)
        if precision.divides_last and name not in self._fuses:
            self._fuses[name] = is_fused(subject.build(), exercise.batches[0])
        return replace(precision, divides_last=precision.divides_last and self._fuses[name])

    def first_step(self, name: str, subject: Subject, make: Callable[[], Exercise], plan: Plan) -> RunTrace:
        """The first step alone, in the plan's precision and cut."""
        exercise, cut = self.exercise(name, make), plan_cut(plan, subject.run.train)
        precision = self._precision(name, subject, exercise, plan)
        exercise = at_rest(exercise, precision)
        one = replace(exercise, batches=exercise.batches[:1], rates=exercise.rates[:1], evaluation=())
        key = (f"{name}, one step", precision, cut, None)
        if key not in self._courses:
            self._courses[key] = run_reference(subject.build, one, precision, cut)
        return self._courses[key]

    def references(
        self, name: str, subject: Subject, make: Callable[[], Exercise], plan: Plan, *, tight: bool = False
    ) -> References:
        """`tight` asks for the reordered course too, where the precision is low."""
        if not self._is_main:
            return References()
        exercise, cut = self.exercise(name, make), plan_cut(plan, subject.run.train)
        precision = self._precision(name, subject, exercise, plan)
        exercise = at_rest(exercise, precision)
        begins = "in bfloat16" if precision.rounds_weights else ""
        delay = Delay.of(plan, subject.skeleton())

        def course(precision: ReferencePrecision, cut: BatchSplit) -> RunTrace:
            is_any = precision is TRUTH and cut.ranks == 0  # float64, and nothing is kept from chunk to chunk
            key = (f"{name} {begins}", precision, None if is_any else cut, delay)
            if key not in self._courses:
                if delay is None:
                    self._courses[key] = run_reference(subject.build, exercise, precision, cut)
                else:
                    self._courses[key] = run_delayed(subject.build, exercise, precision, cut, delay)
            return self._courses[key]

        if course(TRUTH, cut).buffers:
            cut = joint_cut(plan, subject.run.train)
        return References(
            truth=course(TRUTH, cut),
            same=course(precision, cut),
            reordered=course(precision, replace(cut, is_reordered=True)) if tight and precision.is_low else None,
            parting=_parting(plan, precision, routes=has_experts(exercise)),
        )


def _parting(plan: Plan, precision: ReferencePrecision, *, routes: bool) -> RoundingAllowance:
    """Plans whose roundings in low precision are not those of one process from the first step on. Gradients at rest in
    bfloat16 are summed over micro-batches so: rounded terms, as those of tensor parallelism."""
    along = ROUTED_ALONG if routes else ALONG_SHARE
    if precision.float8 != "none":  # another order of a float32 sum makes an operand round the other way
        return rounded_terms("float8_e4m3fn", along=along)
    is_float32, compute = precision.compute == precision.master, str(precision.compute).removeprefix("torch.")
    if precision.rounds_weights or (not is_float32 and (plan.mesh.tp > 1 or plan.compile.enabled)):
        return rounded_terms(compute, along=along)
    return flipped_terms(compute) if not is_float32 and precision.divides_last else RoundingAllowance()
