"""The question of `weft dryrun` (a run, its plan, a device) and its answer: dry runs of the ranks that can differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from weft import hardware
from weft.cli.dryrun.view import ProgressBar, culprit
from weft.core.cluster import Cluster
from weft.core.errors import BadValueError, MeshError, PlanError, WeftError
from weft.core.model_shape import ModelShape
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.fit import Fit, fit_of
from weft.dryrun.many import DryRunJob, dry_runs
from weft.dryrun.record import DryRun
from weft.plan.ask import ask
from weft.plan.changes import Change, largest_saving, saving_of, smallest_changes
from weft.plan.estimate import Estimate, estimate
from weft.plan.request import Request
from weft.plan.resolve import resolve

ANY_GPU = "H100-80GB"  # its formulas predict where no device is named: every GPU has the same terms


@dataclass(frozen=True, kw_only=True)
class DryRunQuestion:
    """A run under a plan, the devices that must hold it, and the planner's request where its model is known."""

    run: RunSpec
    asked: dict[str, Any]  # the plan's tables, as given
    plan: Plan  # resolved
    device: str | None  # as given
    cluster: Cluster | None  # None where no device was named: nothing has to fit
    request: Request | None
    imbalance: float = 1.0  # of routers, in expert parallelism

    @staticmethod
    def of(
        run: RunSpec, tables: dict[str, Any], device: str | None, *, source: str = "the plan", imbalance: float = 1.0
    ) -> DryRunQuestion:
        """Resolve the plan, before any process starts."""
        is_cpu = device is not None and device.upper().startswith("CPU")

        def devices(num_ranks: int) -> str:
            if device is None:
                raise PlanError(
                    "activations.policy = 'budget' needs the memory of a device, and no device is named",
                    hint="--device H200, or name the blocks: --set activations.mixture=[full,selective]",
                )
            return devices_of(device, num_ranks=num_ranks)

        plan = resolve(tables, run, on_gpu=not is_cpu, devices=devices, source=source)
        named = devices_of(device or ANY_GPU, num_ranks=plan.num_ranks)
        return DryRunQuestion(
            run=run,
            asked=tables,
            plan=plan,
            device=device,
            cluster=hardware.cluster(named) if device is not None else None,
            request=_request(run, plan, named),
            imbalance=imbalance,
        )

    def job(self, *, rank: int, memory_only: bool = False) -> DryRunJob:
        device = self.cluster.device if self.cluster is not None else None
        job = DryRunJob.on(device, self.run, self.plan, rank=rank, memory_only=memory_only)
        return replace(job, imbalance=self.imbalance)

    def fit(self, found: DryRun) -> Fit | None:
        return fit_of(found, self.cluster.device) if self.cluster is not None else None

    def predicted(self) -> Estimate | None:
        return estimate(self.request, self.plan) if self.request is not None else None


@dataclass(frozen=True, kw_only=True)
class DryRunAnswer:
    """The dry run of the rank with the highest peak, and the planner's prediction for it."""

    question: DryRunQuestion
    found: DryRun
    others: tuple[DryRun, ...]  # ranks with lower peaks
    predicted: Estimate | None
    fit: Fit | None
    changes: list[Change]  # each makes the run fit; empty where it fits
    saving: Change | None  # the change that saves most

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints."""
        answer = self.found.as_dict()
        answer["memory"]["predicted"] = self.predicted.memory_terms if self.predicted else {}
        answer["other_ranks"] = [{"rank": one.rank, "peak_bytes": one.peak_bytes} for one in self.others]
        answer["culprit"] = culprit(self.found.peak)
        answer["largest_saving"] = self.saving.as_dict() if self.saving else None
        if self.question.plan.activations.mixture is not None:
            answer["mixture"] = list(self.question.plan.activations.mixture)
        answer["changes"] = [change.as_dict() for change in self.changes]
        fields = ("device", "capacity_bytes", "needed_bytes", "free_bytes", "fits")
        return answer | {field: getattr(self.fit, field, None) for field in fields}


def measure(question: DryRunQuestion, *, rank: int | None) -> DryRunAnswer:
    """Dry runs of the ranks that can have the highest peak, with the planner's prediction."""
    plan = question.plan
    if rank is not None and rank >= plan.num_ranks:
        raise MeshError(
            f"--rank {rank} is out of range: the plan has {plan.num_ranks} ranks",
            hint=f"ranks are 0 to {plan.num_ranks - 1}",
        )
    ranks = [rank] if rank is not None else ranks_that_differ(question)
    jobs = [question.job(rank=one) for one in ranks]
    with ProgressBar(f"{'a step' if len(jobs) == 1 else 'steps'} on fake tensors", total=len(jobs)) as progress:
        outcomes = dry_runs(jobs, on_done=progress.advance)
    for outcome in outcomes:
        if isinstance(outcome, WeftError):
            raise outcome
    found = sorted((one for one in outcomes if not isinstance(one, WeftError)), key=lambda one: -one.peak_bytes)
    fullest, predicted, request = found[0], question.predicted(), question.request
    changes = changes_that_fit(question, fullest, predicted)
    return DryRunAnswer(
        question=question,
        found=fullest,
        others=tuple(found[1:]),
        predicted=predicted,
        fit=question.fit(fullest),
        changes=[saving_of(request, plan, one, at_peak=fullest.terms) for one in changes] if request else [],
        saving=largest_saving(request, plan, at_peak=fullest.terms) if request is not None else None,
    )


def changes_that_fit(question: DryRunQuestion, found: DryRun, predicted: Estimate | None) -> list[Change]:
    """The planner's smallest changes, with its budget scaled by predicted over dry-run memory where that is below 1."""
    fit = question.fit(found)
    if fit is None or fit.fits or predicted is None or question.request is None:
        return []
    budget = round(fit.capacity_bytes * min(1.0, predicted.memory_bytes / fit.needed_bytes))
    return smallest_changes(question.request, question.plan, budget_bytes=budget)


def ranks_that_differ(question: DryRunQuestion) -> list[int]:
    """The first rank, whose local shards are the largest; and the last one where shards are uneven.

    With a pipeline: the first rank of the first stage, of a middle stage and of the last stage.
    """
    plan = question.plan
    if plan.mesh.pp > 1:
        places = sorted({0, plan.mesh.pp // 2, plan.mesh.pp - 1})
        return [place * (plan.num_ranks // plan.mesh.pp) for place in places]
    shards = plan.mesh.dp_shard
    is_even = question.request is None or not any(size % shards for size in _sharded_sizes(question.request.shape))
    return [0] if is_even or plan.num_ranks == 1 else [0, plan.num_ranks - 1]


def _sharded_sizes(shape: ModelShape) -> set[int]:
    """The first dimension of every parameter, which `fully_shard` shards."""
    sizes = {shape.vocab_size, shape.hidden_size}
    for block in shape.kinds:
        sizes |= {linear.copies if linear.copies > 1 else linear.out_features for linear in block.linears}
        sizes |= {norm.size for norm in block.norms if norm.num_parameters}
    return sizes


def devices_of(device: str, *, num_ranks: int) -> str:
    """`num_ranks` devices in the notation of `hardware`: full nodes where they divide, smaller ones where not."""
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


def _request(run: RunSpec, plan: Plan, devices: str) -> Request | None:
    """The planner's request; None for a model unknown to the planner, whose shape the dry run does not need."""
    try:
        question = ask(run, devices, precision=plan.precision.model_dump(exclude_none=True))
    except WeftError:
        return None
    return replace(question.request, tp_may_leave_node=True)
