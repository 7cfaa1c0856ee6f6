"""A verification on live ranks: the reference on rank 0, the plan on all, one check after the other.

Set-up (imports, corpus, the float64 truth) is shared between the plans of one session. All functions are collective;
the verdict is rank 0's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.engine import Engine
from weft.engine.optim import OptimizerPolicy
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.train.process import Process
from weft.train.rate import learning_rate_at
from weft.verify.checks import (
    check_same_bits,
    check_scalars,
    check_tensors,
    distance_of,
    norm_of,
    owner_of,
    worst_scalars,
)
from weft.verify.evidence import Evidence, collect
from weft.verify.exercise import (
    LOSS_SCALE,
    Subject,
    evaluation_batches,
    plan_precision,
    training_batches,
    whole_exercise,
)
from weft.verify.facts import check_collectives, check_dtypes, check_initial, check_replicas, check_rows
from weft.verify.layouts import coordinates_of, plan_name
from weft.verify.reference import Course, Exercise, Tensors
from weft.verify.references import Library, References
from weft.verify.tolerances import CODE_ROUNDOFF, UNIT_ROUNDOFF, scalar_drift, tensor_drift
from weft.verify.verdict import Check, Verdict, Worst, at_place
from weft.verify.whole_runs import WholeRuns

ACTIVE_CLIP = 0.25  # well below the first gradient norms of fresh models, so that clipping is part of the proof
OTHER_CUTS = 3


class Session:
    """Everything that several plans over one run share."""

    def __init__(self, run: RunSpec, process: Process, *, steps: int, scratch: Path, device: torch.device) -> None:
        self.subject = Subject.open(run)
        self.process = process
        self.steps = steps
        self.device = device
        self.clip_norm = min(run.train.clip_norm, ACTIVE_CLIP)
        self._rates = [learning_rate_at(run.train, step + 1) for step in range(steps)]
        self._library = Library(is_main=process.is_main)
        self._whole_runs = WholeRuns(run, process, steps=steps, scratch=scratch, device=device, library=self._library)

    def verify(
        self,
        plan: Plan,
        *,
        changes: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda _: None,
        until_wrong: bool = False,
    ) -> Verdict:
        """The verdict on `plan`; `until_wrong` ends after the first stage that finds something."""
        began_s = time.perf_counter()
        checks: list[Check] = []
        numbers: dict[str, Any] = {}
        for stage, found in self._stages(plan, numbers):
            progress(stage)
            checks += found()
            if until_wrong and self._anyone_wrong(checks):
                break
        return Verdict(
            plan=plan_name(plan),
            steps=self.steps,
            checks=tuple(checks),
            changes=changes,
            elapsed_s=time.perf_counter() - began_s,
            **numbers,
        )

    def _stages(self, plan: Plan, numbers: dict[str, Any]) -> Iterator[tuple[str, Callable[[], list[Check]]]]:
        """The stages in order; each gives its checks when called, on every rank."""
        kept: dict[str, Any] = {}

        def train() -> list[Check]:
            kept["references"] = self.references(plan)
            kept["found"] = self.evidence(plan)
            return self._compare(plan, numbers, kept["references"], kept["found"]) if self.process.is_main else []

        def repeat() -> list[Check]:
            detail = "the same run twice, equal bits"
            return [check_same_bits("determinism", kept["found"], self.evidence(plan), rule=3, detail=detail)]

        yield "training against the reference", train
        yield "accumulation", lambda: self._accumulation(plan, kept["references"])
        yield "determinism", repeat
        yield "the training loop, resume and export", lambda: self._whole_runs.check_loop(plan)
        yield "finite data", lambda: [self._whole_runs.check_finite_data(plan)]

    def references(self, plan: Plan) -> References:
        """What the plan is held against; empty on ranks but 0."""
        return self._library.references("exercise", self.subject, self._exercise, plan, tight=True)

    def _exercise(self) -> Exercise:
        return whole_exercise(self.subject, rates=self._rates, clip_norm=self.clip_norm)

    def evidence(self, plan: Plan) -> Evidence:
        """The plan's course over the exercise."""
        engine = self.engine(plan)
        share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
        batches = training_batches(self.subject, steps=self.steps, **share)
        return collect(engine, batches, self._rates, evaluation_batches(self.subject, **share))

    def engine(self, plan: Plan) -> Engine:
        subject = self.subject
        skeleton, source = subject.skeleton(), subject.skeleton()
        # On the CPU also for a GPU: the reference draws its values there.
        weights = InitialWeights(source, describe(source), seed=subject.run.train.seed, device=torch.device("cpu"))
        engine = Engine(
            skeleton,
            plan,
            optimizer=OptimizerPolicy.of(subject.run.train),
            seed=subject.run.train.seed,
            clip_norm=self.clip_norm,
            frozen=subject.run.train.frozen,
            weights=weights,
            device=self.device,
        )
        if engine.loss_scale.enabled:
            engine.loss_scale.value = LOSS_SCALE
        return engine

    def _compare(self, plan: Plan, numbers: dict[str, Any], references: References, found: Evidence) -> list[Check]:
        """In the order of cause and effect: what is wrong first is named first."""
        truth, same, policy = references.truth, references.same, plan.precision.policy()
        exercise = self._library.exercise("exercise", self._exercise)
        share = self.subject.run.train.global_batch // plan.mesh.dp_degree

        def describe_owner(name: str, row: int) -> str:
            rank = owner_of(found.owners.get(name), row)
            return f" on {coordinates_of(plan, rank)}" if rank is not None else ""

        numbers["loss_max_abs_diff"] = worst_scalars(truth.losses, found.losses, relative=False)
        numbers["grad_norm_max_rel_diff"] = worst_scalars(truth.norms, found.norms, relative=True)
        if plan.data_parallel.zero > 0:
            numbers["replicated_parameters"] = tuple(row.name for row in found.coverage if not row.sharded_axes)
        gradients, numbers["worst_gradient"] = self._gradients(plan, truth, same, found, dtype=policy.weights)
        weights, numbers["worst_weight"] = self._weights(plan, truth, same, found, after=self.steps)
        ends = [1, self.steps]
        checks = [
            check_rows(exercise.batches, found.batches, describe_row=lambda row: coordinates_of(plan, row // share)),
            check_initial(exercise.initial, found.initial, describe_owner=describe_owner),
            check_dtypes(found.dtypes),
            check_scalars("loss", truth.losses, same.losses, found.losses, rule=1),
            gradients,
            check_scalars("gradient norm", truth.norms, same.norms, found.norms, rule=2),
            self._weights(plan, truth, same, found, after=1)[0],
            weights,
            self._optimizer_state(plan, truth, same, found),
            check_scalars("evaluation", truth.eval_losses, same.eval_losses, found.eval_losses, rule=1, steps=ends),
            check_replicas(found.digests, describe_rank=lambda rank: coordinates_of(plan, rank)),
            check_collectives(plan, found),
        ]
        if references.reordered is not None:
            checks.insert(-1, self._same_precision(plan, references, found))
        return checks

    def _gradients(
        self, plan: Plan, right: Course, near: Course, found: Evidence, *, dtype: str = "float32"
    ) -> tuple[Check, Worst]:
        return check_tensors(
            "gradients", right.first_gradients, near.first_gradients, found.first_gradients, rule=1, dtype=dtype,
            step=1, owners=found.owners, describe_rank=partial(coordinates_of, plan),
        )  # fmt: skip

    def _weights(
        self,
        plan: Plan,
        right: Course,
        near: Course,
        found: Evidence,
        *,
        after: int,
        drifts: Mapping[str, float] | None = None,
    ) -> tuple[Check, Worst]:
        """The weights after the first update or after the last one."""
        name = "weights" if after > 1 else "first update"
        right_weights, near_weights, weights = (
            course.weights if after > 1 else course.first_weights for course in (right, near, found)
        )
        parameters = {key: value for key, value in weights.items() if key in found.initial}
        return check_tensors(
            name, right_weights, near_weights, parameters, rule=2, dtype="float32", step=after,
            initial=right.initial, owners=found.owners, describe_rank=partial(coordinates_of, plan), drifts=drifts,
        )  # fmt: skip

    def _optimizer_state(
        self, plan: Plan, right: Course, near: Course, found: Evidence, *, drifts: Mapping[str, float] | None = None
    ) -> Check:
        owners = {key: found.owners.get(key.rpartition(".")[0], []) for key in found.optimizer}
        check, _ = check_tensors(
            "optimizer state", right.optimizer, near.optimizer, found.optimizer, rule=2, dtype="float32",
            step=self.steps, owners=owners, describe_rank=partial(coordinates_of, plan), drifts=drifts,
        )  # fmt: skip
        return check

    def _same_precision(self, plan: Plan, references: References, found: Evidence) -> Check:
        """Against one process in the plan's own precision, within what another order of sums does to it."""
        truth, same, reordered = references.truth, references.same, references.reordered or references.same
        roundoff = self._roundoff(plan)

        def scalars(what: str, right: list[float], low: list[float], near: list[float], value: list[float]) -> Check:
            drifts = [
                scalar_drift(distance=abs(a - b), size=abs(b), roundoff=roundoff)
                for a, b in zip(right, low, strict=True)
            ]
            steps = list(range(1, self.steps + 1)) if len(low) == self.steps else [1, self.steps]
            if what != "evaluation":
                drifts[0] = 0.0  # before any update there is nothing to flip
            return check_scalars(what, low, near, value, rule=6, steps=steps, drifts=drifts)

        def drifts(right: Tensors, low: Tensors) -> dict[str, float]:
            return {
                key: tensor_drift(distance=distance_of(right[key], low[key]), norm=norm_of(low[key]), roundoff=roundoff)
                for key in low
            }

        weights, states = drifts(truth.weights, same.weights), drifts(truth.optimizer, same.optimizer)
        parts = [
            scalars("loss", truth.losses, same.losses, reordered.losses, found.losses),
            self._gradients(plan, same, reordered, found)[0],
            scalars("gradient norm", truth.norms, same.norms, reordered.norms, found.norms),
            self._weights(plan, same, reordered, found, after=self.steps, drifts=weights)[0],
            self._optimizer_state(plan, same, reordered, found, drifts=states),
            scalars("evaluation", truth.eval_losses, same.eval_losses, reordered.eval_losses, found.eval_losses),
        ]
        for part in parts:
            if part.finding is not None:
                place = ", ".join(text for text in (part.name, part.finding.coordinates) if text)
                return Check.failed("same precision", replace(part.finding, rule=6, coordinates=place))
        margin = max(part.margin for part in parts)
        return Check.passed("same precision", "losses, gradients, weights and states of one process", margin=margin)

    def _roundoff(self, plan: Plan) -> float:
        """Of the coarsest format that takes part."""
        precision = plan_precision(plan, self.subject.run.train)
        compute = UNIT_ROUNDOFF[str(precision.compute).removeprefix("torch.")]
        return max(compute, CODE_ROUNDOFF) if precision.has_8bit_moments else compute

    def _accumulation(self, plan: Plan, references: References) -> list[Check]:
        """The first step of the same global batch, cut in other ways."""
        truth, same = references.truth, references.same
        rows = self.subject.run.train.global_batch // plan.mesh.dp_degree
        cuts = [count for count in range(1, rows + 1) if rows % count == 0 and count != plan.pipeline.microbatches]
        # All ranks take all first steps before anything is judged: a rank that knows the answer must not leave early.
        steps = {count: self._first_step(plan, microbatches=count) for count in cuts[:OTHER_CUTS]}
        for count, (loss, norm) in steps.items() if self.process.is_main else ():
            for what, right, rounded, value in (
                ("loss", truth.losses, same.losses, loss),
                ("norm", truth.norms, same.norms, norm),
            ):
                check = check_scalars("accumulation", right[:1], rounded[:1], [value], rule=1)
                if check.finding is not None:
                    return [Check.failed("accumulation", at_place(check.finding, f"{what} with {count} micro-batches"))]
        names = " and ".join(str(count) for count in cuts[:OTHER_CUTS])
        detail = f"the same first step with {names} micro-batches" if names else "one row a rank: no other cut"
        return [Check.passed("accumulation", detail)]

    def _first_step(self, plan: Plan, *, microbatches: int) -> tuple[float, float]:
        tables = plan.model_dump(mode="json", exclude_none=True)
        tables["pipeline"]["microbatches"] = microbatches
        engine = self.engine(Plan.from_tables(tables))
        share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
        record = engine.step(training_batches(self.subject, steps=self.steps, **share)[0])
        return record.loss, record.grad_norm

    def _anyone_wrong(self, checks: list[Check]) -> bool:
        """Whether rank 0 found something, agreed over all ranks: they must leave the stages together."""
        wrong = torch.tensor([not all(check.ok for check in checks)], dtype=torch.int32, device=self.device)
        if self.process.world_size > 1:
            dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return bool(wrong.item())
