"""Names of plans, another layout of the same ranks, coordinates of a rank. No torch."""

from __future__ import annotations

import math

from weft.core import axes
from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan


def plan_name(plan: Plan) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1) or "one rank"
    microbatches = plan.pipeline.microbatches
    tensors = f"{_tensor_switches(plan)}, " if plan.mesh.tp > 1 else ""
    tensors += f"{_expert_switches(plan)}, " if plan.mesh.ep > 1 else ""
    tensors += f"{_context_switches(plan)}, " if plan.mesh.cp > 1 else ""
    tensors += f"{plan.pipeline.schedule}, " if plan.mesh.pp > 1 else ""
    tensors += "delayed updates, " if plan.offload.delayed else ""
    batches = f"{microbatches} micro-batch{'es' if microbatches > 1 else ''}"
    return f"{plan.strategy_name}, {mesh}, {tensors}{batches}, {plan.precision.preset}"


def _tensor_switches(plan: Plan) -> str:
    """'1d with SP and LP'."""
    policy = plan.tensor_parallel
    given = [name for name, is_on in (("SP", policy.sequence_parallel), ("LP", policy.loss_parallel)) if is_on]
    return f"{policy.mode} with {' and '.join(given)}" if given else policy.mode


def _expert_switches(plan: Plan) -> str:
    """'ep 2 by tokens, folded'."""
    policy = plan.expert_parallel
    return f"ep {plan.mesh.ep} by {policy.dispatcher}" + (f", {policy.tensor}" if plan.mesh.tp > 1 else "")


def _context_switches(plan: Plan) -> str:
    """'ring, ulysses 2, zigzag'."""
    policy = plan.context_parallel
    groups = f", ulysses {policy.ulysses}" if policy.ulysses > 1 else ""
    return f"{policy.attention}{groups}, {policy.split}"


def other_layout(plan: Plan, *, global_batch: int, has_untrained: bool = False) -> Plan:
    """Another layout of the same ranks: sharded becomes replicated, replicated becomes fully sharded.

    `has_untrained`: some parameters get no gradient, which DDP must be told.

    The tp degree is halved if it is a 1-D power of two, else it becomes 1. The pp degree becomes 1, and so does
    cp if there are enough rows.
    """
    sharded, tp, cp = plan.data_parallel.zero > 0, _other_degree(plan), 1
    dp_degree = plan.num_ranks // tp
    if global_batch % dp_degree:  # too few rows for this dp degree
        if plan.mesh.pp > 1:
            return _other_schedule(plan)
        dp_degree, tp, cp = plan.mesh.dp_degree, plan.mesh.tp, plan.mesh.cp
    tables = plan.model_dump(mode="json", exclude_none=True)
    tables["mesh"] = {axes.DP_REPLICATE if sharded else axes.DP_SHARD: dp_degree, axes.CP: cp, axes.TP: tp}
    tables["data_parallel"] = {"zero": 0, "find_unused_parameters": has_untrained} if sharded else {"zero": 3}
    tables["tensor_parallel"]["mode"] = "1d" if tp != plan.mesh.tp else plan.tensor_parallel.mode
    tables["activations"]["partition"] = plan.activations.partition and tp > 1
    tables["pipeline"].update(virtual_stages=1, blocks=[])
    tables["pipeline"]["microbatches"] = math.gcd(plan.pipeline.microbatches, global_batch // dp_degree)
    tables["offload"]["delayed"] = False
    if sharded:  # replicas keep all weights on the device
        tables["offload"]["parameters"] = "none"
    if any(not_executed_reasons(Plan.from_tables(tables))):  # gradients in bfloat16 are not summed over sharded ones
        tables["pipeline"]["microbatches"] = 1
    return Plan.from_tables(tables)


def _other_schedule(plan: Plan) -> Plan:
    """The same mesh with another schedule and the default split of blocks, where rows are too few for more dp ranks."""
    tables = plan.model_dump(mode="json", exclude_none=True)
    tables["pipeline"].update(schedule="gpipe" if plan.pipeline.schedule == "1f1b" else "1f1b", virtual_stages=1)
    tables["pipeline"]["blocks"] = []
    tables["offload"]["delayed"] = False
    return Plan.from_tables(tables)


def _other_degree(plan: Plan) -> int:
    tp = plan.mesh.tp
    is_power_of_two = tp & (tp - 1) == 0
    return tp // 2 if plan.tensor_parallel.mode == "1d" and is_power_of_two and tp > 1 else 1


def coordinates_of(plan: Plan, rank: int) -> str:
    """'rank 3 (dp_replicate 1, dp_shard 1)'; ep is a part of its axes, the innermost one."""
    sizes, places, rest = plan.mesh.sizes(), {}, rank
    for axis, size in reversed(sizes.items()):
        rest, places[axis] = divmod(rest, size)
    parts = [f"{axis} {places[axis]}" for axis, size in sizes.items() if size > 1]
    if plan.mesh.ep > 1:
        among = 0
        for axis in (axis for axis in sizes if axis in plan.expert_parallel.axis_names):
            among = among * sizes[axis] + places[axis]
        parts.append(f"ep {among % plan.mesh.ep}")
    return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")
