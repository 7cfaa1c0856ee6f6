"""A verification on live ranks: the reference on rank 0, the plan on all, one check after the other.

Set-up (imports, corpus, the float64 truth) is shared between the plans of one session. All functions are collective;
the verdict is rank 0's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.core.errors import PipelineError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.tensor_grid import row_chunks
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.schedule import Calls, check_request
from weft.train.process import Process
from weft.train.rate import learning_rate_at
from weft.verify.borders import check_reach
from weft.verify.checks import check_same_bits, check_scalars
from weft.verify.comparison import Comparison
from weft.verify.evidence import Evidence, collect
from weft.verify.exercise import (
    LOSS_SCALE,
    Subject,
    at_rest,
    evaluation_batches,
    plan_precision,
    training_batches,
    whole_exercise,
)
from weft.verify.layouts import plan_name
from weft.verify.prediction import check_prediction
from weft.verify.reference import Exercise
from weft.verify.references import Library, References
from weft.verify.repeatable import repeatable
from weft.verify.short_stretches import STRETCH_TOKENS, short_stretches, takes_stretches
from weft.verify.verdict import Check, Verdict, at_place
from weft.verify.whole_runs import WholeRuns

ACTIVE_CLIP = 0.25  # well below the first gradient norms of fresh models, so that clipping is part of the proof
OTHER_CUTS = 3
# the first makes the optimizer's states, and may have its peak as it does; the second finds the peak, the third looks
MEASURED_STEPS = 3


class Session:
    """Everything that several plans over one run share."""

    def __init__(self, run: RunSpec, process: Process, *, steps: int, scratch: Path, device: torch.device) -> None:
        if steps < 2:
            raise ValueError("one step shows neither an update nor a resume: verify at least two")
        self.subject = Subject.open(run, device=device, num_ranks=process.world_size)
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
        require_enough_steps(plan, steps=self.steps)
        began_s = time.perf_counter()
        gc.collect()  # the groups of earlier engines end with their last reference, which may be in a cycle
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
            if not self.process.is_main:
                return []
            comparison = self._comparison(plan, kept["references"], kept["found"])
            numbers.update(comparison.numbers())
            reach = check_reach(self.subject.borders, plan, kept["found"].batches, comparison.exercise.evaluation)
            return [*comparison.checks(), reach]

        def repeat() -> list[Check]:
            with repeatable(plan, self.device) as steady:
                found = kept["found"] if steady is plan else self.evidence(steady)
                again = self.evidence(steady)
            detail = "the same run twice, equal bits" + ("" if steady is plan else "; attention written out")
            return [check_same_bits("determinism", found, again, rule=3, detail=detail)]

        def loop() -> list[Check]:
            with repeatable(plan, self.device) as steady:
                return self._whole_runs.check_loop(steady)

        yield "training against the reference", train
        yield "accumulation", lambda: self._accumulation(plan, kept["references"])
        yield "determinism", repeat
        yield "prediction", lambda: [self._prediction(plan)]
        yield "the training loop, resume and export", loop
        yield "finite data", lambda: self._whole_runs.check_finite_data(plan)

    def check_oracle(self, plan: Plan) -> list[Check]:
        """The oracle's checks alone: what the plan shares with its reference."""
        return self._whole_runs.check_oracle(plan)

    def references(self, plan: Plan) -> References:
        """What the plan is held against; empty on ranks but 0."""
        return self._library.references("exercise", self.subject, self._exercise, plan, tight=True)

    def _comparison(self, plan: Plan, references: References, found: Evidence) -> Comparison:
        train = self.subject.run.train
        return Comparison(
            plan=plan,
            train=train,
            steps=self.steps,
            exercise=at_rest(self._library.exercise("exercise", self._exercise), plan_precision(plan, train)),
            references=references,
            found=found,
        )

    def _exercise(self) -> Exercise:
        return whole_exercise(self.subject, rates=self._rates, clip_norm=self.clip_norm)

    def evidence(self, plan: Plan) -> Evidence:
        """The plan's course over the exercise."""
        with self.engine(plan) as engine:
            share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
            batches = training_batches(self.subject, steps=self.steps, **share)
            return collect(engine, batches, self._rates, evaluation_batches(self.subject, **share))

    def engine(self, plan: Plan) -> Engine:
        subject = self.subject
        skeleton, source = subject.skeleton(), subject.skeleton()
        weights = InitialWeights(source, describe(source), seed=subject.run.train.seed, device=self.device)
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

    def _accumulation(self, plan: Plan, references: References) -> list[Check]:
        """The first step of the same global batch, cut in other ways."""
        if plan.mesh.pp > 1 and plan.pipeline.schedule == "pipedream":
            return [Check.passed("accumulation", "every micro-batch is an update: another cut is another run")]
        rows = self.subject.run.train.global_batch // plan.mesh.dp_degree
        rows //= row_chunks(plan.tensor_parallel.mode, plan.mesh.tp)  # a grid deals every micro-batch out once more
        cuts = [count for count in range(1, rows + 1) if rows % count == 0 and count != plan.pipeline.microbatches]
        cuts = [count for count in cuts if not _no_schedule(plan, count)]
        tries = [(f"{count} micro-batches", _recut(plan, count), False) for count in cuts[:OTHER_CUTS]]
        tries += [(f"stretches of {STRETCH_TOKENS} tokens", plan, True)] if takes_stretches(plan) else []
        # All ranks take all first steps before anything is judged: a rank that knows the answer must not leave early.
        steps = [self._first_step(other, is_stretched=is_stretched) for _, other, is_stretched in tries]
        truth, parting = references.truth, references.parting
        if truth.buffers:
            return [
                Check.passed("accumulation", "forwards keep statistics of a micro-batch: another cut is another run")
            ]
        for (what, other, _), values in zip(tries, steps, strict=True) if self.process.is_main else ():
            same = self._library.first_step("exercise", self.subject, self._exercise, other)
            for kind, right, rounded, value, least in (
                ("loss", truth.losses, same.losses, values[0], parting.losses),
                ("norm", truth.norms, same.norms, values[1], parting.norms),
            ):
                check = check_scalars("accumulation", right[:1], rounded, [value], rule=1, least=least)
                if check.finding is not None:
                    return [Check.failed("accumulation", at_place(check.finding, f"{kind} with {what}"))]
        names = " and ".join(what for what, _, _ in tries)
        detail = f"the same first step with {names}" if names else "one row a rank: no other cut"
        return [Check.passed("accumulation", detail)]

    def _prediction(self, plan: Plan) -> Check:
        with self.engine(plan) as engine:
            share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
            batches = training_batches(self.subject, steps=self.steps, **share)[:MEASURED_STEPS]
            return check_prediction(engine, batches, self.subject.run, plan)

    def _first_step(self, plan: Plan, *, is_stretched: bool) -> tuple[float, float]:
        about = short_stretches(self.subject.borders.vocab_size) if is_stretched else nullcontext()
        with about, self.engine(plan) as engine:
            share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
            record = engine.step(training_batches(self.subject, steps=self.steps, **share)[0])
            return record.loss, record.grad_norm

    def _anyone_wrong(self, checks: list[Check]) -> bool:
        """Whether rank 0 found something, agreed over all ranks: they must leave the stages together."""
        wrong = torch.tensor([not all(check.ok for check in checks)], dtype=torch.int32, device=self.device)
        if self.process.world_size > 1:
            dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return bool(wrong.item())


def require_enough_steps(plan: Plan, *, steps: int) -> None:
    """The collectives of the last step are judged, which is to be full; and the evaluation after the first one drains.

    Asked before anything trains, so that every rank refuses."""
    pipeline = plan.pipeline
    if plan.mesh.pp == 1 or not pipeline.never_drains:
        return
    calls = Calls(name=pipeline.schedule, num_ranks=plan.mesh.pp, num_microbatches=pipeline.microbatches)
    least = 2 + calls.delay
    if steps < least:
        raise PipelineError(
            f"{steps} steps do not fill {pipeline.schedule} over {plan.mesh.pp} ranks after the first evaluation",
            hint=f"verify it with --steps {least} or more",
        )


def _recut(plan: Plan, microbatches: int) -> Plan:
    tables = plan.model_dump(mode="json", exclude_none=True)
    tables["pipeline"]["microbatches"] = microbatches
    return Plan.from_tables(tables)


def _no_schedule(plan: Plan, microbatches: int) -> list[str]:
    """Why the plan's pipeline has no schedule for so many micro-batches."""
    if plan.mesh.pp == 1:
        return []
    pipeline = plan.pipeline
    return check_request(
        pipeline.schedule,
        num_ranks=plan.mesh.pp,
        num_microbatches=microbatches,
        virtual_stages=pipeline.virtual_stages,
    )
