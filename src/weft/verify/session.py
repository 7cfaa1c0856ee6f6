"""A verification on live ranks: the reference on rank 0, the plan on all ranks, one stage after another.

The plans of one session share set-up (imports, corpus, the float64 truth). All functions are collective; the verdict is
rank 0's.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.coded_sums import without_rounding
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.tensor_grid import row_chunks
from weft.engine.activations import kept_tensors
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.engine.preference import REFERENCE
from weft.engine.reference import row_log_probs
from weft.engine.router.apply import with_router_of
from weft.models.adapter.build import initial_weights
from weft.plan.legality import is_legal
from weft.train.build import run_objective
from weft.train.ranks.process import Process
from weft.train.rate import learning_rate_at
from weft.verify.borders import check_reach
from weft.verify.checks import check_same_bits, check_scalars
from weft.verify.comparison import Comparison
from weft.verify.evidence import Evidence, collect, first_gradients
from weft.verify.exercise import (
    LOSS_SCALE,
    Subject,
    at_rest,
    evaluation_batches,
    global_exercise,
    plan_precision,
    training_batches,
)
from weft.verify.float8_check import check_products
from weft.verify.layouts import plan_name
from weft.verify.planned import PlannedCollectives, check_collectives
from weft.verify.prediction import check_prediction
from weft.verify.references import ReferenceCache, References
from weft.verify.refusals import require_comparable, require_enough_steps
from weft.verify.repeatable import repeatable
from weft.verify.router_reference import is_declared, require_declared, require_verifiable
from weft.verify.run_trace import Exercise, Tensors
from weft.verify.short_stretches import CHUNK_TOKENS, has_chunked_loss, short_chunks
from weft.verify.verdict import Check, Verdict, at_place
from weft.verify.whole_runs import WholeRuns

ACTIVE_CLIP = 0.25  # well below the first gradient norms of fresh models, so that clipping is verified too
OTHER_SPLITS = 3
# the first creates the optimizer states and may peak there; the second finds the peak, the third takes its terms
MEASURED_STEPS = 3

STAGES = (
    "training against the reference",
    "accumulation",
    "determinism",
    "prediction",
    "the training loop, resume and export",
    "finite data",
)


class Session:
    """State shared by the plans that are verified on one run."""

    def __init__(self, run: RunSpec, process: Process, *, steps: int, scratch: Path, device: torch.device) -> None:
        if steps < 2:
            raise ValueError(f"steps is {steps}, but only two steps show an update and a resume: set at least 2")
        self.subject = Subject.open(run, device=device, num_ranks=process.world_size)
        require_comparable(run)
        require_verifiable(self.subject.skeleton(), run.router)
        self.process = process
        self.steps = steps
        self.device = device
        self.clip_norm = min(run.train.clip_norm, ACTIVE_CLIP)
        self._rates = [learning_rate_at(run.train, step + 1) for step in range(steps)]
        self._cache = ReferenceCache(is_main=process.is_main)
        self._whole_runs = WholeRuns(run, process, steps=steps, scratch=scratch, device=device, cache=self._cache)

    def _with_known_router(self, plan: Plan) -> Plan:
        """A router that only the preset has in float32 computes as the rest where the reference does not know it."""
        model = self.subject.skeleton()
        plan, _ = with_router_of(model, plan)
        policy, precision = plan.precision.policy(), plan.precision
        if policy.has_wide_router and "router" in precision.given:
            require_declared(model)
        if not policy.has_wide_router or is_declared(model):
            return plan
        return plan.model_copy(update={"precision": precision.model_copy(update={"router": policy.weights})})

    def verify(
        self,
        plan: Plan,
        *,
        changes: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda _: None,
        until_wrong: bool = False,
        stages: Collection[str] = STAGES,
    ) -> Verdict:
        """The verdict on `plan`; `until_wrong` stops after the first stage with a failed check. `stages` has the first
        one, whose findings others read."""
        require_enough_steps(plan, steps=self.steps)
        plan = self._with_known_router(plan)
        began_s = time.perf_counter()
        gc.collect()  # frees the process groups of earlier engines, which may be in reference cycles
        checks: list[Check] = []
        numbers: dict[str, Any] = {}
        for stage, found in zip(STAGES, self._stages(plan, numbers), strict=True):
            if stage not in stages:
                continue
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

    def _stages(self, plan: Plan, numbers: dict[str, Any]) -> Sequence[Callable[[], list[Check]]]:
        """The functions of STAGES; each runs on every rank and returns the checks."""
        kept: dict[str, Any] = {}

        def train() -> list[Check]:
            kept["references"] = self.references(plan)
            kept["found"] = self.evidence(plan)
            if not self.process.is_main:
                return []
            comparison = self._comparison(plan, kept["references"], kept["found"])
            numbers.update(comparison.numbers())
            reach = check_reach(self.subject.borders, plan, kept["found"].batches, comparison.exercise.evaluation)
            run, config, coverage = self.subject.run, self.subject.config, kept["found"].coverage
            planned = PlannedCollectives.of(run, plan, config=config, coverage=coverage)
            scales = check_products(kept["found"].wrong_products, plan.float8)
            return [*comparison.checks(), *scales, check_collectives(planned, kept["found"].traffic), reach]

        def repeat() -> list[Check]:
            with repeatable(plan, self.device) as steady:
                found = kept["found"] if steady is plan else self.evidence(steady)
                again = self.evidence(steady)
            detail = "the same run twice, equal bits" + ("" if steady is plan else "; attention written out")
            return [check_same_bits("determinism", found, again, rule=3, detail=detail)]

        def loop() -> list[Check]:
            with repeatable(plan, self.device) as steady:
                return self._whole_runs.check_loop(steady, has_untrained=bool(_untrained(kept["found"])))

        return (
            train,
            lambda: self._accumulation(plan, kept["references"]),
            repeat,
            lambda: [self._prediction(plan, kept["found"])],
            loop,
            lambda: self._whole_runs.check_finite_data(plan),
        )

    def check_oracle(self, plan: Plan) -> list[Check]:
        """The oracle's checks alone: they cover the code that plan and reference share."""
        return self._whole_runs.check_oracle(plan)

    def references(self, plan: Plan) -> References:
        """The traces to compare the plan with; empty on ranks other than 0."""
        return self._cache.references("exercise", self.subject, self._exercise, plan, tight=True)

    def _comparison(self, plan: Plan, references: References, found: Evidence) -> Comparison:
        train = self.subject.run.train
        return Comparison(
            is_stream=not self.subject.borders.has_gaps,
            plan=plan,
            train=train,
            steps=self.steps,
            exercise=at_rest(self._cache.exercise("exercise", self._exercise), plan_precision(plan, train)),
            references=references,
            found=found,
        )

    def _exercise(self) -> Exercise:
        return global_exercise(self.subject, rates=self._rates, clip_norm=self.clip_norm)

    def evidence(self, plan: Plan) -> Evidence:
        """The plan's run of the exercise."""
        exact = self._exact_gradients(plan) if plan.precision.policy().has_coded_sums or plan.coded_gather else {}
        with self.engine(plan) as engine:
            share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
            batches = self._batches(engine)
            evaluation = [self._with_reference(engine, one) for one in evaluation_batches(self.subject, **share)]
            found = collect(engine, batches, self._rates, evaluation)
        found.exact_gradients = exact
        return found

    def _exact_gradients(self, plan: Plan) -> Tensors:
        """First gradients that travel in float32 through the collectives of codes."""
        with without_rounding(), self.engine(plan) as engine:
            return first_gradients(engine, self._batches(engine, count=1)[0])

    def _batches(self, engine: Engine, *, count: int | None = None) -> list[dict[str, torch.Tensor]]:
        """This rank's rows of the first steps, with what the run's objective adds. `engine` has the initial weights."""
        share = {"dp_rank": engine.topology.dp_rank, "dp_degree": engine.topology.dp_degree}
        batches = training_batches(self.subject, steps=self.steps, **share)[:count]
        return [self._with_reference(engine, batch) for batch in batches]

    def _with_reference(self, engine: Engine, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        has_reference = self.subject.run.objective.has_reference
        return {**batch, REFERENCE: row_log_probs(engine, batch)} if has_reference else batch

    def engine(self, plan: Plan) -> Engine:
        subject = self.subject
        kept_tensors.LEAST_BYTES = 1  # models are small here, and their saved tensors must leave too
        skeleton = subject.skeleton()
        weights = initial_weights(subject.run, subject.config, device=self.device)
        engine = Engine(
            skeleton,
            plan,
            optimizer=OptimizerPolicy.of(subject.run.train),
            objective=run_objective(subject.run, plan, subject.config, device=self.device),
            seed=subject.run.train.seed,
            clip_norm=self.clip_norm,
            frozen=subject.run.train.frozen,
            router=subject.run.router,
            weights=weights,
            device=self.device,
        )
        if engine.loss_scale.enabled:
            engine.loss_scale.value = LOSS_SCALE
        return engine

    def _accumulation(self, plan: Plan, references: References) -> list[Check]:
        """Check the first step of the same global batch with other numbers of micro-batches."""
        if plan.mesh.pp > 1 and plan.pipeline.schedule == "pipedream":
            return [Check.passed("accumulation", "every micro-batch is an update: another split is another run")]
        rows = self.subject.run.train.global_batch // plan.mesh.dp_degree
        rows //= row_chunks(plan.tensor_parallel.mode, plan.mesh.tp)  # a grid splits every micro-batch again
        counts = [count for count in range(1, rows + 1) if rows % count == 0 and count != plan.pipeline.microbatches]
        splits = [(f"{count} micro-batches", _with_microbatches(plan, count), False) for count in counts]
        tries = [split for split in splits if is_legal(split[1])][:OTHER_SPLITS]
        tries += [(f"chunks of {CHUNK_TOKENS} tokens", plan, True)] if has_chunked_loss(plan) else []
        # All ranks take all first steps before any check: a rank that knows the answer must not leave early.
        steps = [self._first_step(other, is_chunked=is_chunked) for _, other, is_chunked in tries]
        truth, allowance = references.truth, references.allowance
        if truth.buffers:
            return [
                Check.passed("accumulation", "forwards keep statistics of a micro-batch: another split is another run")
            ]
        for (what, other, _), values in zip(tries, steps, strict=True) if self.process.is_main else ():
            same = self._cache.first_step("exercise", self.subject, self._exercise, other)
            for kind, right, rounded, value, least in (
                ("loss", truth.losses, same.losses, values[0], allowance.losses),
                ("norm", truth.norms, same.norms, values[1], allowance.norms),
            ):
                check = check_scalars("accumulation", right[:1], rounded, [value], rule=1, least=least)
                if check.finding is not None:
                    return [Check.failed("accumulation", at_place(check.finding, f"{kind} with {what}"))]
        names = " and ".join(what for what, _, _ in tries)
        detail = f"the same first step with {names}" if names else "one row per rank: no other split"
        return [Check.passed("accumulation", detail)]

    def _prediction(self, plan: Plan, found: Evidence) -> Check:
        with self.engine(plan) as engine:
            return check_prediction(
                engine,
                self._batches(engine, count=MEASURED_STEPS),
                self.subject.run,
                plan,
                found.coverage,
                untrained=_untrained(found),
            )

    def _first_step(self, plan: Plan, *, is_chunked: bool) -> tuple[float, float]:
        chunks = short_chunks(self.subject.borders.vocab_size) if is_chunked else nullcontext()
        with chunks, self.engine(plan) as engine:
            record = engine.step(self._batches(engine, count=1)[0])
            return record.loss, record.grad_norm

    def _anyone_wrong(self, checks: list[Check]) -> bool:
        """Whether a check failed on rank 0, agreed by all ranks: they must leave the stages together."""
        wrong = torch.tensor([not all(check.ok for check in checks)], dtype=torch.int32, device=self.device)
        if self.process.world_size > 1:
            dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        return bool(wrong.item())


def _untrained(found: Evidence) -> set[str]:
    """Trainable parameters without a gradient; every rank knows."""
    trainable = {row.name for row in found.coverage if row.trainable and row.tied_to is None}
    return trainable - set(found.first_gradients)


def _with_microbatches(plan: Plan, microbatches: int) -> Plan:
    tables = plan.model_dump(mode="json", exclude_none=True)
    tables["pipeline"]["microbatches"] = microbatches
    return Plan.from_tables(tables)
