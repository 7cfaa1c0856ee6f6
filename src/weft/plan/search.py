"""Search: enumerate plans, drop illegal ones, estimate the rest, rank.

Order: plans that fit, fastest first; within TIE of each other the simpler one (fewer axes, less recompute, lower ZeRO
stage) first. The list has one plan per layout, so that variants of one micro-batch size do not hide alternatives.
Memory is estimated for every legal plan, time for those that fit; offload to the host is tried only if nothing else
fits, since it never makes a plan faster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.core.precision_presets import PRESETS
from weft.plan.columns import Bools, Columns, Floats, Ints
from weft.plan.estimate import Costs, Estimate, estimate_columns, fitting, record_at
from weft.plan.memory.peak import estimate_memory
from weft.plan.plan_rows import columns_of, plan_at
from weft.plan.request import Request
from weft.plan.rules import legal_rows
from weft.plan.space import Freedom, enumerate_plans
from weft.plan.staging import with_staging
from weft.plan.time.step_time import estimate_time
from weft.plan.view import views_of

TIE = 0.03  # plans closer than this are equal within the error of the formulas (median error of step time: see docs)
DOES_NOT_FIT = "does not fit in the device's memory"
SAMPLE = 1_000
CHUNK = 20_000  # plans per estimate: their columns fit the CPU's cache


@dataclass(frozen=True)
class Answer:
    """The ranked plans and the counts of the search."""

    request: Request
    plans: list[Estimate]
    considered: int
    estimated: int
    rejected: dict[str, int]
    num_fitting: int
    pareto: list[Estimate]
    elapsed_s: float
    smallest: Estimate | None = None  # of all plans by memory: the closest one if nothing fits
    fixed: Mapping[str, object] = field(default_factory=dict)  # keys that the search held
    sample: Columns = field(repr=False, default_factory=lambda: columns_of([]))  # candidates of "what if" estimates


def search(
    request: Request, *, freedom: Freedom | None = None, precision: dict[str, Any] | None = None, top: int = 5
) -> Answer:
    """The best legal plans."""
    freedom = with_preset(freedom or Freedom(), precision or {})
    answer = replace(_search_once(request, freedom, precision or {}, top), fixed=freedom.fixed)
    can_offload = request.cluster.host_memory_bytes > 0 and "offload.optimizer" not in freedom.fixed
    if answer.num_fitting or not answer.estimated or not can_offload:
        return answer
    offloaded = replace(freedom, fixed={**freedom.fixed, "offload.optimizer": "cpu"})
    return replace(_merged(answer, _search_once(request, offloaded, precision or {}, top)), fixed=freedom.fixed)


def has_fitting_plan(request: Request, fixed: Mapping[str, object]) -> bool:
    """Whether some plan fits: with all blocks recomputed, which needs the least memory."""
    freedom = Freedom(schedules=("1f1b",), recompute=("full",), tp_modes=("1d",), fixed=dict(fixed))
    columns = enumerate_plans(request, freedom)
    legal, _ = legal_rows(request, columns)
    columns = columns.take(np.flatnonzero(legal))
    return bool(len(columns)) and bool(np.any(fitting(request, estimate_memory(views_of(request, columns)))))


def with_preset(freedom: Freedom, precision: dict[str, Any]) -> Freedom:
    """The keys of [float8] that a preset implies are fixed too."""
    preset = PRESETS[precision.get("preset", "fp32")]
    implied = {f"float8.{key}": value for key, value in preset.float8.items()}
    return replace(freedom, fixed={**implied, **freedom.fixed})


def _merged(without: Answer, offloaded: Answer) -> Answer:
    """Both searches as one answer; plans of the second if any of them fits."""
    chosen = offloaded if offloaded.num_fitting else without
    rejected = dict(without.rejected)
    for reason, count in offloaded.rejected.items():
        rejected[reason] = rejected.get(reason, 0) + count
    return replace(
        chosen,
        considered=without.considered + offloaded.considered,
        estimated=without.estimated + offloaded.estimated,
        rejected=rejected,
        elapsed_s=without.elapsed_s + offloaded.elapsed_s,
        smallest=offloaded.smallest or without.smallest,
    )


def _search_once(request: Request, freedom: Freedom, precision: dict[str, Any], top: int) -> Answer:
    began_s = time.perf_counter()
    candidates = enumerate_plans(request, freedom)
    legal, rejected = legal_rows(request, candidates)
    columns = candidates.take(np.flatnonzero(legal))
    if not len(columns):
        return Answer(request, [], len(candidates), 0, rejected, 0, [], time.perf_counter() - began_s)
    order, (memory, step_s) = ranked(request, columns)
    fits = np.isfinite(step_s)
    if int((~fits).sum()):
        rejected = {**rejected, DOES_NOT_FIT: int((~fits).sum())}
    best = _one_of_each_layout(columns, order, top=top)
    front = _pareto(memory, step_s)

    def records(rows: Ints) -> list[Estimate]:
        chosen = columns.take(rows)
        if len(rows) and "offload.staging_bytes" not in freedom.fixed:
            chosen = with_staging(request, chosen)
        return _records(request, chosen, precision)

    return Answer(
        request=request,
        plans=records(best),
        considered=len(candidates),
        estimated=len(columns),
        rejected=rejected,
        num_fitting=int(fits.sum()),
        pareto=records(front[:12]),
        elapsed_s=time.perf_counter() - began_s,
        smallest=records(np.asarray([int(np.argmin(memory))]))[0],
        sample=columns.take(_sample(order, memory, fits)),
    )


def ranked(request: Request, columns: Columns) -> tuple[Ints, tuple[Floats, Floats]]:
    """(rows, best first; memory and step time per row)."""
    memory, step_s = _score(request, columns)
    return _ranking(columns, memory, step_s, np.isfinite(step_s)), (memory, step_s)


def _sample(order: Ints, memory: Floats, fits: Bools) -> Ints:
    """The best plans that fit and the smallest that do not: candidates for other requests."""
    outside = np.flatnonzero(~fits)
    nearest = outside[np.argsort(memory[outside], kind="stable")[:SAMPLE]]
    return np.concatenate([order[fits[order]][:SAMPLE], nearest])


def _score(request: Request, columns: Columns) -> tuple[Floats, Floats]:
    """(bytes per plan; seconds per step, infinity for plans that do not fit)."""
    memory, step_s = np.empty(len(columns)), np.full(len(columns), np.inf)
    for begin in range(0, len(columns), CHUNK):
        rows = np.arange(begin, min(begin + CHUNK, len(columns)))
        found = estimate_memory(views_of(request, columns.take(rows)))
        memory[rows] = found.total
        chosen = rows[fitting(request, found)]
        if len(chosen):
            step_s[chosen] = estimate_time(views_of(request, columns.take(chosen))).total
    return memory, step_s


def _ranking(columns: Columns, memory: Floats, step_s: Floats, fits: Bools) -> Ints:
    """Plans that fit by time, in steps of TIE, then by simplicity; then the others by memory."""
    best = np.min(step_s, initial=np.inf)
    with np.errstate(invalid="ignore"):  # nothing fits: infinity over infinity
        slower = np.floor(np.log(step_s / best) / TIE)
    first = np.where(fits, slower, np.inf)
    second = np.where(fits, complexity(columns), memory)
    return np.lexsort((step_s, second, first))


def complexity(columns: Columns) -> Floats:
    """Complexity of a plan: axes in use, recompute, offload, rare schedules."""
    axes = sum(
        (getattr(columns, axis) > 1).astype(float) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
    )
    extras = 0.5 * (columns.recompute > 0) + 2.0 * (columns.offload_optimizer > 0) + 1.0 * (columns.tp_mode > 0)
    schedule = np.where(columns.named("1f1b"), 0.0, np.where(columns.named("interleaved_1f1b"), 0.2, 0.4))
    depth = 0.1 * sum(np.log2(getattr(columns, axis)) for axis in ("cp", "tp", "pp", "ep"))
    return axes + extras + schedule * (columns.pp > 1) + depth + 0.1 * columns.zero


def _one_of_each_layout(columns: Columns, order: Ints, *, top: int) -> Ints:
    """The first of each (mesh, stage, schedule family) in order."""
    seen: set[tuple[int, ...]] = set()
    chosen: list[int] = []
    names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero", "tp_mode", "offload_optimizer")
    for row in order:
        key = tuple(int(getattr(columns, name)[row]) for name in names)
        if key not in seen:
            seen.add(key)
            chosen.append(int(row))
        if len(chosen) == top:
            break
    return np.asarray(chosen, dtype=np.int64)


def _pareto(memory: Floats, step_s: Floats) -> Ints:
    """Pareto-optimal plans in time and memory that fit, fastest first."""
    order = np.lexsort((memory, step_s))
    order = order[np.isfinite(step_s[order])]
    if not len(order):
        return order
    best = np.minimum.accumulate(memory[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = best[1:] < best[:-1]
    return order[is_first]


def _records(request: Request, columns: Columns, precision: dict[str, Any]) -> list[Estimate]:
    if not len(columns):
        return []
    costs: Costs = estimate_columns(request, columns)
    return [record_at(costs, row, plan_at(costs.columns, row, precision=precision)) for row in range(len(columns))]
