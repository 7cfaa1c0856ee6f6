"""`weft dryrun`: will it fit? One rank's training step on fake tensors, without devices. Exit 1 when it does not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # imported inside the verb: `weft --help` must not pay for what it does not use
    from weft.core.cluster import Cluster
    from weft.core.model_shape import ModelShape
    from weft.core.plan import Plan
    from weft.core.run_spec import RunSpec
    from weft.dryrun.fit import Fit
    from weft.dryrun.many import DryRunJob
    from weft.dryrun.record import DryRun
    from weft.plan.changes import Change
    from weft.plan.estimate import Estimate
    from weft.plan.request import Request

ANY_GPU = "H100-80GB"  # whose formulas are asked where no device is named: the terms are those of every GPU


def dryrun(
    run: Annotated[
        str | None, typer.Argument(help="run.toml, or a model as weft plan takes it; without, the embedded default.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.toml: the layout, of any number of ranks.")] = None,
    device: Annotated[
        str | None, typer.Option(help="What it must fit on: H200, A100-40GB, …; CPU takes a CPU's kernels.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank; without, the one that holds most.")] = None,
    sweep: Annotated[
        str | None, typer.Option(help="KEY=V1,V2,… or KEY alone, up to the largest that fits; or microbatch[=…].")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value of run.toml or plan.toml; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON on stdout.")] = False,
) -> None:
    """Run the very training step of a rank on fake tensors: peak memory by term, traffic, and whether it fits."""
    from weft.cli.resolve import require_known_sections, resolve_model, resolve_plan
    from weft.core.plan import Plan

    given = settings or []
    require_known_sections(given)
    tables, source = resolve_plan(plan, given, num_ranks=None)[0], str(plan or "the plan")
    layout = Plan.from_tables(tables, source=source)
    spec = resolve_model(run, given, rows=layout.mesh.dp_degree * layout.pipeline.microbatches)
    question = Question.of(spec, tables, device, source=source)
    if sweep is not None:
        from weft.cli.dryrun_sweep import carry_out

        raise typer.Exit(code=carry_out(question, sweep, rank=rank or 0, as_json=as_json))
    answer = measure(question, rank=rank)
    if as_json:
        print(json.dumps(answer.as_dict()))
    else:
        from weft.cli import dryrun_view

        dryrun_view.show(answer)
    raise typer.Exit(code=1 if answer.fit is not None and not answer.fit.fits else 0)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A run under a plan, the devices it is for, and the planner's view of it where it has one."""

    run: RunSpec
    asked: dict[str, Any]  # the plan's tables, as they were given
    plan: Plan  # with nothing left open
    device: str | None  # as it was given
    cluster: Cluster | None  # None: no device was named, so nothing has to fit
    request: Request | None

    @staticmethod
    def of(run: RunSpec, tables: dict[str, Any], device: str | None, *, source: str = "the plan") -> Question:
        """Refuses what cannot be run before any process starts."""
        from weft import hardware
        from weft.core.batching import require_divisible
        from weft.core.executable import require_executable
        from weft.core.open_choices import plan_on

        is_cpu = device is not None and device.upper().startswith("CPU")
        plan = plan_on(tables, on_gpu=not is_cpu, source=source)
        require_executable(plan)
        require_divisible(run, plan)
        devices = devices_of(device or ANY_GPU, num_ranks=plan.num_ranks)
        plan = _settled(run, plan, devices if device is not None else None)
        return Question(
            run=run,
            asked=tables,
            plan=plan,
            device=device,
            cluster=hardware.cluster(devices) if device is not None else None,
            request=_request(run, plan, devices),
        )

    def job(self, *, rank: int, memory_only: bool = False) -> DryRunJob:
        from weft.dryrun.many import DryRunJob

        device = self.cluster.device if self.cluster is not None else None
        return DryRunJob.on(device, self.run, self.plan, rank=rank, memory_only=memory_only)

    def fit(self, found: DryRun) -> Fit | None:
        from weft.dryrun.fit import fit_of

        return fit_of(found, self.cluster.device) if self.cluster is not None else None

    def predicted(self) -> Estimate | None:
        from weft.plan.estimate import estimate

        return estimate(self.request, self.plan) if self.request is not None else None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found of the fullest rank, and what the planner says of it."""

    question: Question
    found: DryRun
    others: tuple[DryRun, ...]  # ranks that hold less
    predicted: Estimate | None
    fit: Fit | None
    changes: list[Change]  # that would make it fit; empty where it does
    saving: Change | None  # what would save most

    def as_dict(self) -> dict[str, Any]:
        """What --json prints."""
        from weft.cli.dryrun_view import culprit

        answer = self.found.as_dict()
        answer["memory"]["predicted"] = self.predicted.memory_terms if self.predicted else {}
        answer["other_ranks"] = [{"rank": one.rank, "peak_bytes": one.peak_bytes} for one in self.others]
        answer["culprit"] = culprit(self.found.peak)
        answer["largest_saving"] = self.saving.as_dict() if self.saving else None
        if self.question.plan.activations.mixture is not None:
            answer["mixture"] = list(self.question.plan.activations.mixture)
        answer["changes"] = [change.as_dict() for change in self.changes]
        fit = self.fit
        return answer | {
            "device": fit.device if fit else None,
            "capacity_bytes": fit.capacity_bytes if fit else None,
            "needed_bytes": fit.needed_bytes if fit else None,
            "free_bytes": fit.free_bytes if fit else None,
            "fits": fit.fits if fit else None,
        }


def measure(question: Question, *, rank: int | None) -> Answer:
    """Dry runs of the ranks that can be fullest, and the planner beside them."""
    from weft.cli.dryrun_view import Progress
    from weft.core.errors import MeshError, WeftError
    from weft.dryrun.many import dry_runs
    from weft.plan.changes import largest_saving, saving_of

    plan = question.plan
    if rank is not None and rank >= plan.num_ranks:
        raise MeshError(f"there is no rank {rank} among {plan.num_ranks}", hint=f"ranks are 0 to {plan.num_ranks - 1}")
    ranks = [rank] if rank is not None else ranks_that_differ(question)
    jobs = [question.job(rank=one) for one in ranks]
    with Progress(f"{'a step' if len(jobs) == 1 else 'steps'} on fake tensors", total=len(jobs)) as progress:
        outcomes = dry_runs(jobs, on_done=progress.advance)
    for outcome in outcomes:
        if isinstance(outcome, WeftError):
            raise outcome
    found = sorted((one for one in outcomes if not isinstance(one, WeftError)), key=lambda one: -one.peak_bytes)
    fullest, predicted, request = found[0], question.predicted(), question.request
    changes = changes_that_fit(question, fullest, predicted)
    return Answer(
        question=question,
        found=fullest,
        others=tuple(found[1:]),
        predicted=predicted,
        fit=question.fit(fullest),
        changes=[saving_of(request, plan, one, at_peak=fullest.terms) for one in changes] if request else [],
        saving=largest_saving(request, plan, at_peak=fullest.terms) if request is not None else None,
    )


def changes_that_fit(question: Question, found: DryRun, predicted: Estimate | None) -> list[Change]:
    """The planner's smallest changes. Its budget is cut by as much as its figure is below the dry run's."""
    from weft.plan.changes import smallest_changes

    fit = question.fit(found)
    if fit is None or fit.fits or predicted is None or question.request is None:
        return []
    budget = round(fit.capacity_bytes * min(1.0, predicted.memory_bytes / fit.needed_bytes))
    return smallest_changes(question.request, question.plan, budget_bytes=budget)


def ranks_that_differ(question: Question) -> list[int]:
    """The first rank, which has the largest part of everything that is cut; and the last, where parts are uneven.

    Of a pipeline, the first of its first stage, of one in the middle and of its last.
    """
    plan = question.plan
    if plan.mesh.pp > 1:
        places = sorted({0, plan.mesh.pp // 2, plan.mesh.pp - 1})
        return [place * (plan.num_ranks // plan.mesh.pp) for place in places]
    shards = plan.mesh.dp_shard
    is_even = question.request is None or not any(size % shards for size in _cut_sizes(question.request.shape))
    return [0] if is_even or plan.num_ranks == 1 else [0, plan.num_ranks - 1]


def _cut_sizes(shape: ModelShape) -> set[int]:
    """What `fully_shard` cuts: the first dimension of every parameter."""
    sizes = {shape.vocab_size, shape.hidden_size}
    for block in shape.kinds:
        sizes |= {linear.copies if linear.copies > 1 else linear.out_features for linear in block.linears}
        sizes |= {norm.size for norm in block.norms if norm.num_parameters}
    return sizes


def devices_of(device: str, *, num_ranks: int) -> str:
    """So many of a device as `hardware` reads it: whole nodes where they divide, smaller ones where not."""
    from weft import hardware
    from weft.core.errors import BadValueError, MeshError

    given = hardware.cluster(device).num_devices  # a misspelt name ends here
    if given == num_ranks:
        return device
    if given > 1:
        raise MeshError(
            f"--device {device} is {given} devices but the plan has {num_ranks} ranks", hint="name one device: H200"
        )
    for per_node in range(num_ranks, 0, -1):
        if num_ranks % per_node == 0:
            try:
                text = f"{num_ranks // per_node}x{per_node}x{device}"
                hardware.cluster(text)
                return text
            except BadValueError:  # more than a node holds
                continue
    return device


def _settled(run: RunSpec, plan: Plan, devices: str | None) -> Plan:
    from weft.core.errors import PlanError
    from weft.plan.ask import settle_budget

    if plan.activations.is_open and devices is None:
        raise PlanError(
            "a budget of recompute is for the memory of a device, and none is named",
            hint="--device H200, or name the blocks: --set activations.mixture=[full,selective]",
        )
    return settle_budget(run, plan, devices) if devices is not None else plan


def _request(run: RunSpec, plan: Plan, devices: str) -> Request | None:
    """None where the planner does not know the model's sizes: the dry run needs none of them."""
    from weft.core.errors import WeftError
    from weft.plan.ask import ask

    try:
        question = ask(run, devices, precision=plan.precision.model_dump(exclude_none=True))
    except WeftError:
        return None
    return replace(question.request, tp_may_leave_node=True)
