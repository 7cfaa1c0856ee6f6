"""Checks the number of collectives of rank 0's step against those that the planner prices.

Numbers are compared by (axis, collective, phase), except in these cases, which the check reports:

    frozen parameters    at most the planned number, except in the forward of tp and pp: all are planned as trained
    small tensors        at most the planned number on the tensor axis: tiny tensors are not observed
    an inexact shape     only kinds of collectives on the tensor axis; other axes depend on the number of blocks
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weft.comm.observer import BUFFERS
from weft.core import axes
from weft.core.plan import Plan
from weft.core.records import ParameterRecord
from weft.core.run_spec import RunSpec
from weft.core.tensor_grid import row_chunks
from weft.plan.axis import SMALL_ELEMENTS
from weft.plan.plan_rows import columns_of
from weft.plan.rules import check_plan
from weft.plan.traffic import estimate_traffic
from weft.plan.view import view_at
from weft.train.ledger.predicted import Prediction, predict
from weft.verify.verdict import Check, Finding

NAME = "collectives"

Key = tuple[str, str, str]  # axis, collective, phase
Traffic = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class PlannedCollectives:
    """Collectives per step of the plan's first rank."""

    bounds: Mapping[Key, tuple[float, float]] = field(default_factory=dict)  # (least, most)
    by_kind: frozenset[str] = frozenset()  # axes whose numbers are not compared
    limits: tuple[str, ...] = ()  # why some are compared less strictly
    not_judged: str = ""

    @staticmethod
    def of(run: RunSpec, plan: Plan, *, config: Any, coverage: Sequence[ParameterRecord]) -> PlannedCollectives:
        """`coverage`: all parameters of the trained model."""
        found, why_not = predict(run, plan, config=config, device_name=None)
        if found is None:
            return PlannedCollectives(not_judged=why_not)
        shape, view = found.request.shape, view_at(found.request, columns_of([plan]), np.arange(1), place=0)
        has_few_rows = view.tokens[0] / row_chunks(plan.tensor_parallel.mode, plan.mesh.tp) <= SMALL_ELEMENTS
        bounds, is_frozen = {}, bool(run.train.frozen) or run.adapter.is_on
        for row in (row for row in estimate_traffic(view).rows if np.round(row.bytes[0])):
            is_partial = is_frozen and (row.phase != "forward" or row.axis == axes.DP_SHARD)
            may_be_fewer = is_partial or (has_few_rows and row.axis == axes.TP)
            least = 0.0 if may_be_fewer else float((row.count if row.least is None else row.least)[0])
            bounds[row.axis, row.collective, row.phase] = (least, float(row.count[0]))
        inexact = inexact_shape(found, plan, coverage)
        has_blocks = not shape.notes and len({row.unit for row in coverage}) == shape.num_layers + 1
        limits = (
            "some at most as planned: parameters are frozen" if is_frozen else "",
            f"at most as planned on {axes.TP}: tensors of {SMALL_ELEMENTS} elements or fewer" if has_few_rows else "",
            f"{axes.TP if has_blocks else 'all axes'} by kind only: {inexact}" if inexact else "",
        )
        by_kind = {axis for axis, _, _ in bounds if not has_blocks or axis == axes.TP} if inexact else ()
        return PlannedCollectives(bounds=bounds, by_kind=frozenset(by_kind), limits=tuple(filter(None, limits)))

    def bounds_of(self, key: Key) -> tuple[float, float]:
        if key[0] in self.by_kind and any(key[:2] == other[:2] for other in self.bounds):
            return 0.0, math.inf
        return self.bounds.get(key, (0.0, 0.0))


def inexact_shape(found: Prediction, plan: Plan, coverage: Sequence[ParameterRecord]) -> str:
    """How the planner's shape differs from the model; "" if it does not."""
    shape, real = found.request.shape, sum(math.prod(row.shape) for row in coverage if row.tied_to is None)
    if shape.num_parameters != real:
        return f"the planner counts {shape.num_parameters:,} parameters, the model has {real:,}"
    refused = [sentence for sentence, _ in check_plan(found.request, columns_of([plan]))]  # the engine does not
    return "; ".join((*shape.notes, *refused))


def rows_by_kind(rows: Traffic) -> dict[Key, Mapping[str, Any]]:
    """Rows by kind, without buffers, and without groups of one rank, which send nothing."""
    kept = [row for row in rows if row["bytes"] and row["phase"] != BUFFERS]
    return {(row["axis"], row["collective"], row["phase"]): row for row in kept}


def check_collectives(planned: PlannedCollectives, sent: Traffic) -> Check:
    """Check the rows of a step's ledger."""
    found = {key: row["count"] for key, row in rows_by_kind(sent).items()}
    total: Counter[str] = Counter()
    for (_, collective, _), count in found.items():
        total[collective] += count
    counts = ", ".join(f"{count} {name}" for name, count in sorted(total.items())) or "none: one rank needs none"
    if planned.not_judged:
        return Check.passed(NAME, f"{counts}: not judged: {planned.not_judged}")
    for key in sorted({*planned.bounds, *found}):
        (axis, collective, phase), (least, most) = key, planned.bounds_of(key)
        if not least <= found.get(key, 0) <= most:
            bounds = f"{most:.0f}" if least == most else f"{least:.0f} to {most:.0f}"
            place = f"{axis} in the {phase}"
            expected, count = f"{bounds} {collective} per step on {place}", str(found.get(key, 0))
            return Check.failed(NAME, Finding(rule=9, expected=expected, found=count))
    return Check.passed(NAME, "; ".join((counts, *planned.limits)))
