"""Costs of one plan as a record and of many as columns: memory, traffic and time from the same formulas."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from weft.core.plan import Plan
from weft.plan.columns import Bools, Columns, Floats
from weft.plan.memory.load_and_save import moments_of
from weft.plan.memory.peak import MemoryEstimate, estimate_memory
from weft.plan.offload import OffloadRecord, offload_record
from weft.plan.plan_rows import columns_of
from weft.plan.pp.stages import PLACES, Place, blocks_of
from weft.plan.request import Request
from weft.plan.time.links import leaves_node
from weft.plan.time.step_time import TimeEstimate, estimate_time
from weft.plan.traffic import Traffic, estimate_traffic
from weft.plan.view import view_at, views_of


@dataclass(frozen=True)
class Costs:
    """Predictions for many plans."""

    request: Request
    columns: Columns
    memory: MemoryEstimate
    traffic: Traffic
    time: TimeEstimate

    @property
    def fits(self) -> Bools:
        return fitting(self.request, self.memory)

    @property
    def step_s(self) -> Floats:
        return self.time.total


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predictions for one plan. Bytes on the fullest rank, seconds per step."""

    plan: Plan
    fits: bool
    memory_bytes: int
    memory_terms: dict[str, int]
    peak_at: str
    place: Place  # pipeline rank of the memory terms
    blocks: tuple[int, ...]  # per pipeline stage
    moments: dict[str, int]  # bytes of loading, saving, resuming
    traffic: list[dict[str, str | int]]
    offload: OffloadRecord
    step_s: float
    time_terms: dict[str, float]
    mfu: float
    tokens_per_s: float

    def as_dict(self) -> dict[str, object]:
        """The record of `weft plan --json`."""
        return {
            "plan": self.plan.model_dump(mode="json", exclude_none=True),
            "fits": self.fits,
            "memory": {
                "total_bytes": self.memory_bytes,
                "terms": self.memory_terms,
                "peak_at": self.peak_at,
                "moments": self.moments,
            },
            **({"blocks": list(self.blocks)} if self.blocks else {}),
            "traffic": self.traffic,
            **self.offload.as_dict(),
            "time": {"step_s": self.step_s, "terms": self.time_terms},
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
        }


def fitting(request: Request, memory: MemoryEstimate) -> Bools:
    """Whether plans fit the devices, and their offloaded bytes the host."""
    return (memory.total <= request.budget_bytes) & (memory.host <= request.host_budget_bytes)


def estimate_columns(request: Request, columns: Columns) -> Costs:
    """Costs of all plans of `columns`."""
    views = views_of(request, columns)
    return Costs(request, columns, estimate_memory(views), estimate_traffic(views[0]), estimate_time(views))


def estimate(request: Request, plan: Plan, *, place: Place | None = None) -> Estimate:
    """Costs of one plan. The request's precision is the plan's.

    For a pipeline: memory of its fullest rank and traffic of its first, or both of the rank at `place`. `fits` is about
    all ranks.
    """
    costs = estimate_columns(request, columns_of([plan]))
    if place is None:
        return record_at(costs, 0, plan)
    view = view_at(request, costs.columns, np.arange(1), place=PLACES.index(place))
    there = replace(costs, memory=estimate_memory([view]), traffic=estimate_traffic(view))
    return replace(record_at(there, 0, plan), fits=bool(costs.fits[0]))


def record_at(costs: Costs, row: int, plan: Plan) -> Estimate:
    """One row as a record; bytes are rounded per term, so that the total is their sum."""
    memory_terms = {str(term): round(float(values[row])) for term, values in costs.memory.terms.items()}
    time_terms = {str(term): float(values[row]) for term, values in costs.time.terms.items()}
    step_s = sum(time_terms.values())
    place = PLACES[int(costs.memory.place[row])]
    stage = f" on the {place} stage" if plan.mesh.pp > 1 else ""
    return Estimate(
        plan=plan,
        fits=bool(costs.fits[row]),
        memory_bytes=sum(memory_terms.values()),
        memory_terms=memory_terms,
        peak_at=costs.memory.instant[int(costs.memory.at[row])] + stage,
        place=place,
        blocks=blocks_of(costs.request.shape, plan),
        moments=moments_of(costs.request, plan),
        traffic=_traffic_at(costs, row),
        offload=offload_record(costs.request, costs.columns.take([row]), costs.memory.offloaded, row, step_s=step_s),
        step_s=step_s,
        time_terms=time_terms,
        mfu=float(costs.time.mfu[row]),
        tokens_per_s=float(costs.time.tokens_per_s[row]),
    )


def _traffic_at(costs: Costs, row: int) -> list[dict[str, str | int]]:
    cluster, columns = costs.request.cluster, costs.columns.take([row])
    return [
        {
            "axis": entry.axis,
            "collective": entry.collective,
            "phase": entry.phase,
            "bytes": round(float(entry.bytes[row])),
            "count": round(float(entry.count[row])),
            "link": cluster.between.name if leaves_node(cluster, columns, entry.axis) else cluster.inside.name,
        }
        for entry in costs.traffic.rows
        if np.round(entry.bytes[row]) > 0
    ]
