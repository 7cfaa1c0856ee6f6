"""Recompute by budget: the fastest mixture of recomputed blocks that fits.

Every mixture (full, selective) of the model's L blocks is estimated as columns: (L + 1)(L + 2) / 2 plans. The fastest
that fits is chosen; no block is recomputed if that fits; all are recomputed if no mixture fits, and the plan then does
not fit. Compiled blocks are recomputed fully or not at all.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.core.open_choices import with_mixture, with_offloaded_blocks
from weft.core.plan import Plan
from weft.plan.columns import MIXED, Bools, Columns, Ints
from weft.plan.memory.peak import estimate_memory
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.time.step_time import estimate_time
from weft.plan.view import views_of

CHUNK = 4_000  # mixtures estimated at a time


def with_chosen_mixture(request: Request, plan: Plan) -> Plan:
    """The plan with the mixture of its budget chosen for the request's devices; other plans unchanged."""
    return with_mixture(plan, choose_mixture(request, plan)) if plan.activations.is_open else plan


def choose_mixture(request: Request, plan: Plan, *, budget_bytes: float | None = None) -> tuple[int, int]:
    """Number of blocks to recompute, (full, selective), so that `plan` fits `budget_bytes` or the request's budget."""
    budget = request.budget_bytes if budget_bytes is None else budget_bytes
    mixtures = every_mixture(request.shape.num_layers, may_select=not plan.compile.enabled)
    columns = _columns(plan, mixtures)
    if np.any(_fits(request, columns.take(np.arange(1)), budget)):
        return 0, 0
    fits = np.concatenate([_fits(request, columns.take(rows), budget) for rows in _chunks(np.arange(len(mixtures)))])
    fitting = np.flatnonzero(fits)
    if not len(fitting):
        return request.shape.num_layers, 0
    step_s = np.concatenate([estimate_time(views_of(request, columns.take(rows))).total for rows in _chunks(fitting)])
    # of equally fast mixtures, the one with fewer recomputed blocks
    order = np.lexsort((mixtures[fitting].sum(axis=1), mixtures[fitting, 0], step_s))
    full, selective = mixtures[fitting[order[0]]]
    return int(full), int(selective)


def every_mixture(num_blocks: int, *, may_select: bool = True) -> Ints:
    """[mixtures, 2]: all (full, selective) of `num_blocks`; the first is (0, 0)."""
    found = [
        (full, selective)
        for full in range(num_blocks + 1)
        for selective in range(num_blocks - full + 1 if may_select else 1)
    ]
    return np.asarray(found, dtype=np.int64)


def _columns(plan: Plan, mixtures: Ints) -> Columns:
    # a block that leaves saves no compute: those that are not recomputed are chosen afterwards
    same = columns_of([with_offloaded_blocks(with_mixture(plan, (0, 0)), 0)]).take(
        np.zeros(len(mixtures), dtype=np.int64)
    )
    return replace(
        same,
        recompute=np.full(len(mixtures), MIXED, dtype=np.int64),
        full_blocks=mixtures[:, 0],
        selective_blocks=mixtures[:, 1],
    )


def _fits(request: Request, columns: Columns, budget_bytes: float) -> Bools:
    memory = estimate_memory(views_of(request, columns))
    return (memory.total <= budget_bytes) & (memory.host <= request.host_budget_bytes)


def _chunks(rows: Ints) -> list[Ints]:
    return [rows[begin : begin + CHUNK] for begin in range(0, len(rows), CHUNK)]
