"""The smallest changes that make a plan fit: single keys first, then pairs of keys, then more devices.

Every figure is the planner's estimate of the changed plan; only these few candidates are tried (for all plans see
`search`). Global batch and sequence length stay; with more devices each has as many sequences as before.

    slower = step_s of the change / step_s of the plan - 1
    saves  = bytes of the estimate, or of a dry run's peak (plan/savings.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from weft.core.errors import NotBuiltError, PlanError
from weft.core.executable import require_executable
from weft.core.plan import SECTIONS, Plan
from weft.core.units import format_bytes
from weft.plan.estimate import Costs, estimate_columns
from weft.plan.memory.budget import choose_mixture
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.rules import legal_rows
from weft.plan.savings import saved_bytes

Keys = dict[str, Any]  # "section.key" of plan.toml or run.toml -> its value

SAME_SPEED = 0.005
FACTORS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Changed keys, with memory and step time of the changed plan."""

    keys: Keys
    text: str
    memory_bytes: int
    step_s: float
    saves_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "keys": self.keys,
            "text": self.text,
            "memory_bytes": self.memory_bytes,
            "step_s": self.step_s,
            "saves_bytes": self.saves_bytes,
        }


def smallest_changes(
    request: Request, plan: Plan, *, budget_bytes: int | None = None, trained_only: bool = True, top: int = 3
) -> list[Change]:
    """Changes that fit `budget_bytes` (default: the request's budget), the least slowdown first."""
    budget = request.budget_bytes if budget_bytes is None else budget_bytes
    for candidates in _rounds(request, plan, budget):
        found = [change for change in _estimated(request, plan, candidates, trained_only) if change.fits(budget)]
        if found:
            return [one.change for one in _one_per_kind(found)[:top]]
    return []


def largest_saving(
    request: Request, plan: Plan, *, trained_only: bool = True, at_peak: Mapping[str, int] | None = None
) -> Change | None:
    """The change that saves most memory, fitting or not; ties go to the faster one.

    `at_peak`: bytes by term of a dry run, from which savings are computed; default: those of the estimate.
    """
    found = _estimated(request, plan, list(_single_keys(request, plan)), trained_only, at_peak)
    best = max(found, key=lambda one: (one.change.saves_bytes, -one.change.step_s), default=None)
    return best.change if best is not None and best.change.saves_bytes > 0 else None


def saving_of(request: Request, plan: Plan, change: Change, *, at_peak: Mapping[str, int]) -> Change:
    """`change` with its savings at a dry run's peak."""
    changed_request, changed = with_keys(request, plan, change.keys)
    before, after = (
        _terms_at(estimate_columns(asked, columns_of([one])), 0)
        for asked, one in ((request, plan), (changed_request, changed))
    )
    return replace(change, saves_bytes=round(saved_bytes(before, after, at_peak=at_peak)))


def fewest_devices(request: Request, plan: Plan) -> int:
    """The number of devices, in doublings, on which the fully sharded plan fits; 0 if none does."""
    wider = _estimated(request, plan, list(_more_devices(request, plan, ())), trained_only=False)
    counts = [one.num_devices for one in wider if one.fits(request.budget_bytes)]
    return min(counts, default=0)


def with_keys(request: Request, plan: Plan, keys: Mapping[str, Any]) -> tuple[Request, Plan]:
    """The request and the plan with these keys; PlanError if they contradict the rest."""
    tables = plan.model_dump(mode="json", exclude_none=True)
    workload: Keys = {}
    for path, value in keys.items():
        section, _, key = path.partition(".")
        if section in SECTIONS:
            tables[section] = {**tables[section], key: value}
        else:
            workload[key] = value
    changed = Plan.from_tables(tables, source="the changed plan")
    cluster = request.cluster
    if changed.num_ranks != cluster.num_devices:
        cluster = replace(cluster, num_nodes=changed.num_ranks // cluster.devices_per_node)
    return replace(
        request,
        cluster=cluster,
        workload=replace(request.workload, **workload),
        precision=changed.precision.policy() if "precision.preset" in keys else request.precision,
    ), changed


@dataclass(frozen=True)
class _Found:
    """A change, its devices and whether it fits the host."""

    change: Change
    num_devices: int
    host_fits: bool

    def fits(self, budget_bytes: float) -> bool:
        return self.host_fits and self.change.memory_bytes <= budget_bytes


@dataclass(frozen=True)
class _Now:
    """The unchanged plan: estimated terms and step time, and bytes at a dry run's peak if known."""

    terms: dict[str, float]
    step_s: float
    at_peak: Mapping[str, int] | None


def _rounds(request: Request, plan: Plan, budget_bytes: float) -> Iterator[list[Keys]]:
    """Rounds of candidates; the next round is tried if nothing of the last one fits."""
    singles = list(_single_keys(request, plan))
    yield [*singles, *_budgets(request, plan, [{}], budget_bytes)]
    yield [*_pairs(singles), *_budgets(request, plan, singles, budget_bytes)]
    yield list(_more_devices(request, plan, singles))


def _single_keys(request: Request, plan: Plan) -> Iterator[Keys]:
    """Single candidates. Keys that only make sense together are one candidate."""
    yield from ({"pipeline.microbatches": count} for count in _more_microbatches(request, plan))
    yield from _more_recompute(plan)
    yield from _higher_stages(plan)
    if request.workload.optimizer in ("adam", "adamw") and plan.mesh.tp == 1:
        own_kernel = {} if request.workload.optimizer_kernel == "auto" else {"train.optimizer_kernel": "auto"}
        yield {"train.optimizer": "adamw8bit", **own_kernel}
    if plan.precision.preset == "fp32" and request.precision == plan.precision.policy():
        yield {"precision.preset": "bf16"}
    if plan.offload.optimizer == "none":
        yield {"offload.optimizer": "cpu"}


def _more_recompute(plan: Plan) -> Iterator[Keys]:
    """More recompute of all blocks; `_budgets` has mixtures."""
    order, have = ("none", "selective", "full"), plan.activations.policy
    if have == "budget":
        yield {"activations.policy": "full", "activations.mixture": []}
    else:
        yield from ({"activations.policy": policy} for policy in order[order.index(have) + 1 :])


def _budgets(request: Request, plan: Plan, beside: Sequence[Keys], budget_bytes: float) -> Iterator[Keys]:
    """Each of these candidates with the fastest mixture that fits, unless it recomputes no or all blocks."""
    for keys in beside:
        if any(key.startswith("activations.") for key in keys):
            continue
        try:
            changed_request, changed = with_keys(request, plan, keys)
        except PlanError:
            continue
        mixture = choose_mixture(changed_request, changed, budget_bytes=budget_bytes)
        if max(mixture) in (0, request.shape.num_layers):
            continue
        policy = {} if plan.activations.policy == "budget" else {"activations.policy": "budget"}
        yield {**keys, **policy, "activations.mixture": list(mixture)}


def _more_microbatches(request: Request, plan: Plan) -> list[int]:
    """Larger numbers of micro-batches, with the same result of a step."""
    rows = request.workload.samples // plan.mesh.dp_degree
    return [count for count in range(plan.pipeline.microbatches + 1, rows + 1) if rows % count == 0]


def _higher_stages(plan: Plan) -> Iterator[Keys]:
    """Higher ZeRO stages over all data-parallel ranks, and the same stage without replicas."""
    mesh, zero = plan.mesh, plan.data_parallel.zero
    if mesh.dp_degree == 1 or plan.data_parallel.is_threaded:
        return
    spread = {"mesh.dp_replicate": 1, "mesh.dp_shard": mesh.dp_degree} if mesh.dp_replicate > 1 else {}
    if spread and zero > 0:
        yield dict(spread)
    for stage in range(zero + 1, 4):
        yield {"data_parallel.zero": stage, **spread}


def _pairs(singles: Sequence[Keys]) -> Iterator[Keys]:
    for first, second in combinations(singles, 2):
        if not set(first) & set(second):
            yield {**first, **second}


def _more_devices(request: Request, plan: Plan, singles: Sequence[Keys]) -> Iterator[Keys]:
    """Full sharding over more devices with as many sequences each; alone and with one more key."""
    degree, taken = plan.mesh.dp_degree, {"data_parallel.zero", "mesh.dp_shard", "mesh.dp_replicate"}
    for factor in FACTORS:
        wider: Keys = {"mesh.dp_shard": degree * factor, "train.global_batch": request.workload.samples * factor}
        if plan.mesh.dp_replicate > 1:
            wider["mesh.dp_replicate"] = 1
        if plan.data_parallel.zero < 3:
            wider["data_parallel.zero"] = 3
        yield wider
        yield from ({**wider, **single} for single in singles if not taken & set(single))


def _estimated(
    request: Request,
    plan: Plan,
    candidates: Sequence[Keys],
    trained_only: bool,
    at_peak: Mapping[str, int] | None = None,
) -> list[_Found]:
    """Estimates of the legal candidates; those with the same request are estimated together."""
    groups: dict[tuple[Any, ...], list[tuple[Keys, Request, Plan]]] = {}
    for keys in candidates:
        try:
            changed_request, changed = with_keys(request, plan, keys)
            if trained_only:
                require_executable(changed)
        except (PlanError, NotBuiltError):
            continue
        same = tuple(sorted((key, value) for key, value in keys.items() if not _is_layout(key)))
        groups.setdefault((changed.num_ranks, same), []).append((keys, changed_request, changed))
    costs = estimate_columns(request, columns_of([plan]))
    now = _Now(_terms_at(costs, 0), float(costs.step_s[0]), at_peak)
    found: list[_Found] = []
    for group in groups.values():
        found += _asked(group, now)
    return found


def _asked(group: list[tuple[Keys, Request, Plan]], now: _Now) -> list[_Found]:
    request = group[0][1]
    columns = columns_of([changed for _, _, changed in group])
    legal, _ = legal_rows(request, columns)
    costs = estimate_columns(request, columns)
    host_fits = costs.memory.host <= request.host_budget_bytes
    changes = [
        _change(keys, _terms_at(costs, row), float(costs.step_s[row]), now) for row, (keys, _, _) in enumerate(group)
    ]
    return [_Found(changes[row], request.cluster.num_devices, bool(host_fits[row])) for row in np.flatnonzero(legal)]


def _terms_at(costs: Costs, row: int) -> dict[str, float]:
    return {str(term): float(values[row]) for term, values in costs.memory.terms.items()}


def _change(keys: Keys, terms: Mapping[str, float], takes_s: float, now: _Now) -> Change:
    needs = sum(terms.values())
    return Change(
        keys=keys,
        text=f"{format_keys(keys)}: {format_bytes(needs)}, {_format_speed(takes_s / now.step_s - 1)}",
        memory_bytes=round(needs),
        step_s=takes_s,
        saves_bytes=round(saved_bytes(now.terms, terms, at_peak=now.at_peak)),
    )


def format_keys(keys: Mapping[str, Any]) -> str:
    """Keys as in plan.toml and run.toml: pipeline.microbatches = 4, activations.policy = 'full'."""
    return ", ".join(f"{key} = {value!r}" for key, value in keys.items())


def _format_speed(slower: float) -> str:
    if abs(slower) < SAME_SPEED:
        return "as fast"
    return f"{slower:.0%} slower" if slower > 0 else f"{-slower:.0%} faster"


def _one_per_kind(found: list[_Found]) -> list[_Found]:
    """Fewest devices first, then fastest; only the fastest value for the same keys.

    activations.mixture counts as activations.policy.
    """

    def rank(one: _Found) -> tuple[int, float, int]:
        return one.num_devices, one.change.step_s, len(one.change.keys)

    seen: set[frozenset[str]] = set()
    chosen = []
    for one in sorted(found, key=rank):
        kind = frozenset("activations.policy" if key == "activations.mixture" else key for key in one.change.keys)
        if kind not in seen:
            seen.add(kind)
            chosen.append(one)
    return chosen


def _is_layout(key: str) -> bool:
    """Whether a key changes only the plan's columns; precision changes the request too."""
    section = key.partition(".")[0]
    return section in SECTIONS and section != "precision"
