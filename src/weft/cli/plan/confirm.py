"""`weft plan --dryrun`: a dry run of every plan of an answer that the engine executes, beside its prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.core.errors import WeftError
from weft.core.terms import MemoryTerm as Term
from weft.core.units import format_bytes
from weft.dryrun.record import DryRun

if TYPE_CHECKING:
    from weft.core.cluster import Device
    from weft.core.run_spec import RunSpec
    from weft.plan.ask import Question
    from weft.plan.estimate import Estimate
    from weft.plan.search import Answer


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """The dry run of a plan, or the reason why there is none."""

    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    fits: bool | None = None
    error: float | None = None  # predicted / dry run - 1; both without memory outside the allocator
    reason: str | None = None  # "not built: …" or "failed: …"

    def as_dict(self) -> dict[str, Any]:
        found = {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "fits": self.fits}
        return {**found, "error": self.error, "reason": self.reason}

    def text(self) -> str:
        """The table cell."""
        if self.peak_bytes is None or self.error is None:
            return (self.reason or "").partition(":")[0]
        return f"{format_bytes(self.peak_bytes)} ({self.error:+.1%})" + ("" if self.fits else " too much")


def confirm(question: Question, answer: Answer, *, model: str) -> list[Confirmation]:
    """One per plan, in order; the dry runs of all plans that the engine executes run in parallel."""
    from weft.cli.dryrun.view import ProgressBar
    from weft.dryrun.many import DryRunJob, dry_runs
    from weft.plan.pp.stages import rank_at
    from weft.plan.trained import why_not_trained

    device, run, shape = question.request.cluster.device, run_of(question, model), question.request.shape
    refused = [why_not_trained(found) for found in answer.plans]
    built = [found for found, reason in zip(answer.plans, refused, strict=True) if not reason]
    jobs = [
        DryRunJob.on(device, run, found.plan, rank=rank_at(shape, found.plan, found.place), memory_only=True)
        for found in built
    ]
    with ProgressBar(f"{len(jobs)} of {len(answer.plans)} plans by dry run", total=len(jobs)) as progress:
        outcomes = iter(dry_runs(jobs, on_done=progress.advance))
    return [
        Confirmation(reason=f"not built: {reason}") if reason else _confirmation(found, next(outcomes), device)
        for found, reason in zip(answer.plans, refused, strict=True)
    ]


def run_of(question: Question, model: str) -> RunSpec:
    """The run of the question."""
    from weft.cli.resolve import resolve_model

    workload = question.request.workload
    settings = [
        f"data.sequence_length={workload.sequence_length}",
        f"train.global_batch={workload.global_batch}",
        f"train.optimizer={workload.optimizer}",
    ]
    return resolve_model(model, settings)


def _confirmation(predicted: Estimate, outcome: DryRun | WeftError, device: Device) -> Confirmation:
    from weft.dryrun.fit import EXPANDABLE, fit_of

    if isinstance(outcome, WeftError):
        return Confirmation(reason=f"failed: {outcome.message}")
    allocated = predicted.memory_bytes - predicted.memory_terms.get(str(Term.FRAMEWORK), 0)
    return Confirmation(
        peak_bytes=outcome.peak_bytes,
        reserved_bytes=outcome.reserved_bytes.get(EXPANDABLE),
        fits=fit_of(outcome, device).fits,
        error=allocated / outcome.peak_bytes - 1,
    )
