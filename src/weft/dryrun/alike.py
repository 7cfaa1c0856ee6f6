"""Extrapolation over micro-batches: dry runs with two and with three of them give a step with any number.

The first micro-batch accumulates into nothing, the last reduces gradients or frees gathered parameters; all others cost
the same. So a step's traffic and FLOPs are affine in their number, and its memory too (rows wait on the device):

    value(m) = value(3) + (m - 3) * (value(3) - value(2))

Micro-batches of a pipeline differ: it is run in full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.core.plan import Plan
from weft.core.records import PeakRecord
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun

FEW, MORE = 2, 3


def are_alike(run: RunSpec, plan: Plan) -> bool:
    """Whether two shorter steps may be extrapolated to this one."""
    chunks = plan.mesh.dp_degree * plan.pipeline.microbatches
    return plan.mesh.pp == 1 and plan.pipeline.microbatches > MORE and run.train.global_batch % chunks == 0


def shortened(run: RunSpec, plan: Plan, *, microbatches: int) -> tuple[RunSpec, Plan]:
    """The same with fewer micro-batches of the same size."""
    batch = run.train.global_batch // plan.pipeline.microbatches * microbatches
    train = run.train.model_copy(update={"global_batch": batch})
    pipeline = plan.pipeline.model_copy(update={"microbatches": microbatches})
    return run.model_copy(update={"train": train}), plan.model_copy(update={"pipeline": pipeline})


def stands_for(few: DryRun, more: DryRun) -> bool:
    """Whether both peak at the same operator and send the same kinds of collectives."""
    places = [(found.peak.phase, found.peak.operator, found.terms.keys(), _rows(found).keys()) for found in (few, more)]
    return places[0] == places[1]


def extended(few: DryRun, more: DryRun, *, microbatches: int) -> DryRun:
    """The extrapolated result for `microbatches`."""
    times = microbatches - MORE
    counted = {key: (row, _rows(few)[key]) for key, row in _rows(more).items()}
    note = f"extrapolated to {microbatches} micro-batches from steps with {FEW} and {MORE}: micro-batches are alike"
    return replace(
        more,
        peak=_peak(few.peak, more.peak, times),
        traffic=[
            {**row, **{name: _line(less[name], row[name], times) for name in ("bytes", "count")}}
            for row, less in counted.values()
        ],
        flops=_line(few.flops, more.flops, times),
        elapsed_s=max(few.elapsed_s, more.elapsed_s),
        notes=(*more.notes, note),
    )


def _peak(few: PeakRecord, more: PeakRecord, times: int) -> PeakRecord:
    """Extrapolate term by term; rows that wait on the device grow."""
    terms = {term: _line(few.terms.get(term, 0), nbytes, times) for term, nbytes in more.terms.items()}
    return replace(more, peak_bytes=sum(terms.values()), terms=dict(sorted(terms.items(), key=lambda item: -item[1])))


def _rows(found: DryRun) -> dict[tuple[str, ...], dict[str, Any]]:
    return {(row["axis"], row["collective"], row["phase"]): row for row in found.traffic}


def _line(few: int, more: int, times: int) -> int:
    return more + times * (more - few)
