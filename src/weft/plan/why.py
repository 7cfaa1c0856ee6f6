"""Explanation of a plan: largest terms, rule of thumb, distance of the runner-up, changes of the request.

Every sentence comes from an estimate, none from a template about models or devices. "What if" estimates use the best
candidates only, so that they cost a fraction of the search.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.core.float8_section import Float8
from weft.core.plan import Plan
from weft.core.terms import StepTerm
from weft.core.units import format_bytes, format_seconds
from weft.plan.changes import fewest_devices
from weft.plan.columns import Columns
from weft.plan.estimate import Estimate, estimate
from weft.plan.plan_rows import columns_of, plan_at
from weft.plan.request import Request
from weft.plan.rules import legal_rows
from weft.plan.search import Answer, ranked
from weft.plan.time.float8 import multiplies_in_float8, why_no_float8
from weft.plan.words import describe


def why_best(answer: Answer) -> str:
    """The explanation of the first plan."""
    best = answer.plans[0]
    parts = [what_binds(answer.request, best), rule_of_thumb(answer.request, best)]
    if best.plan.float8.linears != "none":
        parts.append(float8_gain(answer.request, best))
    if len(answer.plans) > 1 and best.fits:
        parts.append(f"runner-up {describe(answer.plans[1].plan)}: {loses_by(best, answer.plans[1])}")
    return "; ".join(parts)


def what_binds(request: Request, found: Estimate) -> str:
    """The largest terms of memory and of time."""
    term, size = max(found.memory_terms.items(), key=lambda item: item[1])
    share = found.memory_bytes / request.cluster.device.memory_bytes
    slow, seconds = max(found.time_terms.items(), key=lambda item: item[1])
    verb = f"fills {share:.0%} of" if found.fits else f"would need {share:.1f} times"
    return (
        f"{verb} the memory at its peak ({found.peak_at}), "
        f"most of it {_words(term)} ({format_bytes(size)}); "
        f"{seconds / found.step_s:.0%} of a step is {_words(slow)}"
    )


def rule_of_thumb(request: Request, found: Estimate) -> str:
    """DDP if the model fits on one device, else FSDP; tensor and pipeline parallelism beyond the scale of FSDP."""
    mesh, zero = found.plan.mesh, found.plan.data_parallel.zero
    if request.cluster.num_devices == 1:
        return "one device leaves no choice of layout"
    is_data_parallel = mesh.tp == mesh.pp == mesh.cp == mesh.ep == 1
    replicated = _replicated(request, found.plan)
    if is_data_parallel and zero == 0:
        return "follows the rule: it fits on one device, so DDP"
    if is_data_parallel and (replicated is None or not replicated.fits):
        needs = f" (DDP would need {format_bytes(replicated.memory_bytes)})" if replicated else ""
        return f"follows the rule: it does not fit on one device, so its states are sharded{needs}"
    if is_data_parallel:
        return "departs from the rule (it would fit replicated): sharding leaves room for larger micro-batches"
    sharded = _sharded(request, found.plan)
    if sharded is None:
        return "sharding alone is not legal here: the batch does not divide over that many ranks"
    if not sharded.fits:
        return f"goes beyond sharding, which would need {format_bytes(sharded.memory_bytes)} per device"
    return f"goes beyond sharding: FSDP alone would take {format_seconds(sharded.step_s)} per step"


def float8_gain(request: Request, found: Estimate) -> str:
    """Speedup of float8 matmuls, casts included, over the same plan without them."""
    linears = [linear for kind in request.shape.kinds for linear in kind.linears]
    taken = sum(multiplies_in_float8(linear, found.plan.float8.linears) for linear in linears)
    if not taken:
        return f"none of the blocks' matrices multiplies in float8 (float8.linears = {found.plan.float8.linears!r})"
    plain = estimate(request, found.plan.model_copy(update={"float8": Float8()}))
    casts = found.time_terms[StepTerm.FLOAT8_CASTS] / found.step_s
    gain = f"float8 matmuls: {plain.step_s / found.step_s:.2f} times the speed of bf16, casts are {casts:.0%} of a step"
    note = why_no_float8(request)
    return f"{gain} ({note})" if note else gain


def loses_by(best: Estimate, other: Estimate) -> str:
    """Extra time and memory of another plan over the best."""
    if not other.fits:
        return f"does not fit ({format_bytes(other.memory_bytes)})"
    slower = other.step_s / best.step_s - 1
    gaps = {term: other.time_terms[term] - best.time_terms.get(term, 0.0) for term in other.time_terms}
    term = max(gaps, key=lambda name: gaps[name])
    saved = best.memory_bytes - other.memory_bytes
    memory = f", {format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    if slower < 0.001:
        return f"as fast{memory}, but more complex"
    return f"{slower:.1%} slower, by {_words(term)}{memory}"


def what_would_change(answer: Answer) -> list[str]:
    """The best plan with twice the memory, a network four times as fast, or sequences twice as long."""
    request, best = answer.request, answer.plans[0]
    device, cluster, workload = request.cluster.device, request.cluster, request.workload
    faster = replace(cluster.between, bytes_per_s=4 * cluster.between.bytes_per_s)
    cases = {
        "twice the memory": replace(
            request, cluster=replace(cluster, device=replace(device, memory_bytes=2 * device.memory_bytes))
        ),
        "sequences twice as long": replace(
            request, workload=replace(workload, sequence_length=2 * workload.sequence_length)
        ),
    }
    if cluster.num_nodes > 1:
        cases["a network four times as fast"] = replace(request, cluster=replace(cluster, between=faster))
    lines = []
    for name, changed in cases.items():
        other = _best_of(changed, answer.sample, best)
        lines.append(f"with {name}: {_difference(best, other)}")
    return lines


def smallest_changes(answer: Answer) -> list[str]:
    """Changes that make a plan fit if none does, smallest first."""
    request, smallest = answer.request, answer.smallest
    if smallest is None:
        return []
    lines = [
        f"a device with {format_bytes(smallest.memory_bytes / request.memory_share)} of memory "
        f"({describe(smallest.plan)} is the smallest plan)"
    ]
    shorter = request.workload.sequence_length
    while shorter >= 256:
        shorter //= 2
        changed = replace(request, workload=replace(request.workload, sequence_length=shorter))
        if estimate(changed, smallest.plan).fits:
            lines.append(f"sequences of {shorter:,} tokens")
            break
    if request.workload.optimizer in ("adam", "adamw") and smallest.plan.mesh.tp == 1:
        changed = replace(request, workload=replace(request.workload, optimizer="adamw8bit"))
        if estimate(changed, smallest.plan).fits:
            lines.append("the 8-bit optimizer (train.optimizer = 'adamw8bit')")
    devices = fewest_devices(request, smallest.plan)
    if devices:
        lines.append(f"{devices:,} devices instead of {request.cluster.num_devices:,}")
    return lines


def _best_of(request: Request, sample: Columns, current: Estimate) -> Estimate | None:
    legal, _ = legal_rows(request, sample)
    columns = sample.take(np.flatnonzero(legal))
    if not len(columns):
        return None
    precision = current.plan.precision.model_dump(exclude_none=True)
    order, _ = ranked(request, columns)
    found = estimate(request, plan_at(columns, int(order[0]), precision=precision))
    return found if found.fits else None


def _difference(best: Estimate, other: Estimate | None) -> str:
    if other is None:
        return "none of these plans fits"
    if describe(other.plan) == describe(best.plan):
        return "the same plan"
    faster = best.tokens_per_s and other.tokens_per_s / best.tokens_per_s - 1
    return f"{describe(other.plan)} ({faster:+.0%} tokens/s)"


def _replicated(request: Request, plan: Plan) -> Estimate | None:
    """The plan with all states replicated, at the smallest micro-batch."""
    mesh = {"dp_replicate": request.cluster.num_devices}
    return _variant(request, plan, mesh=mesh, zero=0)


def _sharded(request: Request, plan: Plan) -> Estimate | None:
    return _variant(request, plan, mesh={"dp_shard": request.cluster.num_devices}, zero=3)


def _variant(request: Request, plan: Plan, *, mesh: dict[str, int], zero: int) -> Estimate | None:
    rows = request.workload.samples // request.cluster.num_devices
    if rows * request.cluster.num_devices != request.workload.samples or rows == 0:
        return None
    tables = {
        "mesh": mesh,
        "data_parallel": {"zero": zero},
        "pipeline": {"microbatches": rows},
        "precision": plan.precision.model_dump(exclude_none=True),
        "activations": plan.activations.model_dump(),
        "compile": plan.compile.model_dump(),
        "kernels": plan.kernels.model_dump(),
        "float8": plan.float8.model_dump(),
    }
    other = Plan.from_tables(tables)
    return estimate(request, other) if bool(legal_rows(request, columns_of([other]))[0][0]) else None


def _words(term: str) -> str:
    return str(term).replace("_", " ")
