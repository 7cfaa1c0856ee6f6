"""Contradictions within a plan, without a model: `check_consistent` lists them, `require_consistent` raises one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from weft.core.errors import PlanError
from weft.core.float8_section import GATHERED, Float8
from weft.core.precision import impossible
from weft.core.secondary import check_neighbours, check_secondary

if TYPE_CHECKING:
    from weft.core.plan import Plan

# why training and planner refuse one device, or a CPU
DATAPARALLEL_SPREADS = "strategy = 'dataparallel' spreads one process over several GPUs"


def check_consistent(plan: Plan) -> list[tuple[str, str]]:
    """Every contradiction in the plan, as (sentence, hint)."""
    reasons = [*impossible(plan.precision.policy()), *_check_float8(plan)]
    mesh, dp = plan.mesh, plan.data_parallel
    if dp.zero == 0 and mesh.dp_shard > 1:
        reasons.append(
            (
                f"zero = 0 replicates the model, but mesh.dp_shard is {mesh.dp_shard}",
                "set data_parallel.zero = 1, 2 or 3, or move the degree to mesh.dp_replicate",
            )
        )
    if dp.is_threaded and (plan.num_ranks > 1 or dp.zero > 0):
        reasons.append(
            (
                "dataparallel is one process with several GPUs, but the plan has ranks or a ZeRO stage",
                "leave the mesh at 1 and zero = 0, or drop strategy (DDP is faster)",
            )
        )
    if plan.pipeline.vertical_sync and plan.pipeline.schedule != "pipedream":
        reasons.append(
            (
                f"pipeline.vertical_sync is for pipedream, but the schedule is {plan.pipeline.schedule}",
                "remove pipeline.vertical_sync, or use pipeline.schedule = 'pipedream'",
            )
        )
    if plan.activations.mixture is not None and plan.activations.policy != "budget":
        reasons.append(
            (
                f"activations.mixture is for policy = 'budget', but the policy is {plan.activations.policy!r}",
                "set activations.policy = 'budget', or activations.mixture = []",
            )
        )
    if dp.error_feedback and not plan.precision.policy().has_coded_sums:
        reasons.append(
            (
                "data_parallel.error_feedback is for gradients that travel in a lower format, but precision.reduce is "
                "float32",
                "set precision.reduce = 'int8', or remove data_parallel.error_feedback",
            )
        )
    reasons += check_secondary(dp.secondary_shard, zero=dp.zero, shards=mesh.dp_shard * mesh.cp)
    is_coded = plan.precision.policy().has_coded_sums
    reasons += check_neighbours(dp.reduce_neighbours, is_coded=is_coded, ranks=plan.num_reducing)
    reasons += _check_blocks(plan)
    reasons += _check_context(plan)
    pool = math.prod(getattr(mesh, axis) for axis in plan.expert_parallel.axis_names)
    if pool % mesh.ep:
        product = " x ".join(plan.expert_parallel.axis_names)
        reasons.append(
            (
                f"ep = {mesh.ep} does not divide {product} = {pool}",
                f"raise mesh.dp_shard to a multiple of {mesh.ep}, or set mesh.ep = {math.gcd(pool, mesh.ep)}",
            )
        )
    return reasons


def _check_float8(plan: Plan) -> Iterator[tuple[str, str]]:
    """Check components that a section of their own contradicts."""
    given, found = plan.precision.given, plan.policy()
    sections = {"products": "float8.linears", "experts": "float8.experts", "dispatch": "expert_parallel.wire"}
    if given.get("gather") == "int8" and plan.float8.linears != "none" and plan.float8.gather == "float8":
        yield (
            "precision.gather is 'int8', but float8.gather says float8",
            "remove float8.gather: weights of float8 layers travel in int8 too",
        )
    for name, key in sections.items():
        if name in given and given[name] != getattr(found, name):
            sentence = f"precision.{name} is {given[name]!r}, but {key} says {getattr(found, name)}"
            yield sentence, f"remove one of precision.{name} and {key}"
    float8 = plan.float8
    if float8.linears != "none" and float8.gather == "float8" and float8.recipe != GATHERED:
        sentence = f"float8.gather = 'float8' sends one scale per weight, but float8.recipe is {float8.recipe!r}"
        yield sentence, f"set float8.gather = 'weights', or float8.recipe = {GATHERED!r}"
    if float8.recipe == "delayed" and float8.experts == "all":
        sentence = "float8.recipe = 'delayed' has scales of linear layers; experts get other rows in every step"
        yield sentence, "set float8.experts = 'none', or float8.recipe = 'tensorwise'"
    for name in ("amax_history", "margin"):
        if getattr(float8, name) != Float8.model_fields[name].default and float8.recipe != "delayed":
            yield f"float8.{name} without delayed scales", "set float8.recipe = 'delayed'"
    yield from _check_accuracy(plan)


def _check_accuracy(plan: Plan) -> Iterator[tuple[str, str]]:
    """Check `float8.measure_every` and `float8.fallback_error` against each other and the rest."""
    float8 = plan.float8
    if float8.measure_every and float8.linears == float8.experts == "none":
        yield (
            "float8.measure_every measures nothing: no product is in float8",
            "set float8.measure_every = 0, or float8.linears = 'all'",
        )
    if float8.fallback_error and not float8.measure_every:
        yield "float8.fallback_error needs measured steps", "set float8.measure_every"
    if float8.fallback_error and float8.gather == "float8" and "gather" in float8.model_fields_set:
        sentence = "float8.fallback_error with weights gathered in float8: their unquantised values do not arrive"
        yield sentence, "set float8.gather = 'weights'"


def _check_blocks(plan: Plan) -> list[tuple[str, str]]:
    """Check `pipeline.blocks` against the pipeline; planner and engine check it against the model."""
    given, pp, stages = plan.pipeline.blocks, plan.mesh.pp, plan.mesh.pp * plan.pipeline.virtual_stages
    if given is None:
        return []
    if pp == 1:
        return [("pipeline.blocks is set, but mesh.pp is 1", "set mesh.pp, or pipeline.blocks = []")]
    if len(given) != stages:
        sentence = f"pipeline.blocks has {len(given)} numbers, but pp x virtual_stages = {stages} stages"
        return [(sentence, f"give {stages} numbers, one per stage, or pipeline.blocks = [] to balance by cost")]
    return []


def _check_context(plan: Plan) -> Iterator[tuple[str, str]]:
    """Check `context_parallel.ulysses`; it has no meaning without context-parallel ranks."""
    policy, cp = plan.context_parallel, plan.mesh.cp
    name, drop = f"context_parallel.ulysses = {policy.ulysses}", "remove context_parallel.ulysses"
    if cp == 1 or policy.ulysses == 1:
        return
    if policy.attention == "ulysses":
        yield (
            f"{name} is for attention = 'ring' or 'gather'; 'ulysses' exchanges heads among all ranks of mesh.cp",
            drop,
        )
        return
    legal = [str(number) for number in range(2, cp) if cp % number == 0]
    if str(policy.ulysses) not in legal:
        groups = f"groups of {' or '.join(legal)}" if legal else "no smaller groups"
        hint = f"set it to {' or '.join(legal)}, or {drop}" if legal else drop
        yield f"{name}, but the {cp} ranks of mesh.cp divide into {groups}", hint


def require_consistent(plan: Plan, *, source: str = "plan") -> None:
    for sentence, hint in check_consistent(plan):
        raise PlanError(f"{source}: {sentence}", hint=hint)
