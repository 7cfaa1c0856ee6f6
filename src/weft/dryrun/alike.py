"""Micro-batches are alike: two dry runs, of two and of three of them, stand for a step of any number.

The first finds no gradients of others, the last reduces or frees what was kept; all between cost the same. So what a
step sends and computes is affine in their number, and its memory too (rows wait on the device for their turn):

    value(m) = value(3) + (m - 3) * (value(3) - value(2))

A pipeline's micro-batches are not alike: it is run as it stands.
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
    """Whether two shorter steps may stand for this one."""
    pieces = plan.mesh.dp_degree * plan.pipeline.microbatches
    return plan.mesh.pp == 1 and plan.pipeline.microbatches > MORE and run.train.global_batch % pieces == 0


def shortened(run: RunSpec, plan: Plan, *, microbatches: int) -> tuple[RunSpec, Plan]:
    """The same with fewer micro-batches, each of as many rows as before."""
    batch = run.train.global_batch // plan.pipeline.microbatches * microbatches
    train = run.train.model_copy(update={"global_batch": batch})
    pipeline = plan.pipeline.model_copy(update={"microbatches": microbatches})
    return run.model_copy(update={"train": train}), plan.model_copy(update={"pipeline": pipeline})


def stands_for(few: DryRun, more: DryRun) -> bool:
    """Whether both have their peak at the same place, and send the same collectives."""
    places = [(found.peak.phase, found.peak.operator, found.terms.keys(), _rows(found).keys()) for found in (few, more)]
    return places[0] == places[1]


def extended(few: DryRun, more: DryRun, *, microbatches: int) -> DryRun:
    """What a step of `microbatches` would have given."""
    times = microbatches - MORE
    counted = {key: (row, _rows(few)[key]) for key, row in _rows(more).items()}
    note = f"steps of {FEW} and of {MORE} micro-batches stand for one of {microbatches}: micro-batches are alike"
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
    """Term by term; rows that wait for their turn are what grows."""
    terms = {term: _line(few.terms.get(term, 0), nbytes, times) for term, nbytes in more.terms.items()}
    return replace(more, peak_bytes=sum(terms.values()), terms=dict(sorted(terms.items(), key=lambda item: -item[1])))


def _rows(found: DryRun) -> dict[tuple[str, ...], dict[str, Any]]:
    return {(row["axis"], row["collective"], row["phase"]): row for row in found.traffic}


def _line(few: int, more: int, times: int) -> int:
    return more + times * (more - few)
