"""Plans seen from the outside: their names, another layout of the same ranks, where a rank stands. No torch."""

from __future__ import annotations

from weft.core import axes
from weft.core.plan import Plan


def plan_name(plan: Plan) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1) or "one rank"
    cuts = plan.pipeline.microbatches
    return f"{plan.strategy_name}, {mesh}, {cuts} micro-batch{'es' if cuts > 1 else ''}, {plan.precision.preset}"


def other_layout(plan: Plan) -> Plan:
    """Another layout of the same ranks: sharded becomes replicated, replicated becomes fully sharded."""
    tables = plan.model_dump(mode="json", exclude_none=True)
    sharded = plan.data_parallel.zero > 0
    tables["mesh"] = {axes.DP_REPLICATE if sharded else axes.DP_SHARD: plan.num_ranks}
    tables["data_parallel"] = {"zero": 0 if sharded else 3}
    return Plan.from_tables(tables)


def coordinates_of(plan: Plan, rank: int) -> str:
    """'rank 3 (dp_replicate 1, dp_shard 1)'."""
    parts = []
    rest = rank
    for axis, size in reversed(plan.mesh.sizes().items()):
        rest, place = divmod(rest, size)
        if size > 1:
            parts.append(f"{axis} {place}")
    return f"rank {rank}" + (f" ({', '.join(reversed(parts))})" if parts else "")
