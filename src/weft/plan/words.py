"""One-line description of a plan."""

from __future__ import annotations

from weft.core.plan import Plan


def describe(plan: Plan) -> str:
    """'TP 8 x PP 16 (1f1b) x ZeRO-1 64, 32 micro-batches, selective recompute'."""
    mesh = plan.mesh
    parts = [
        *([f"TP {mesh.tp}{_mode(plan)}"] if mesh.tp > 1 else []),
        *([f"PP {mesh.pp} ({_schedule(plan)})"] if mesh.pp > 1 else []),
        *([f"CP {mesh.cp}{_groups(plan)}"] if mesh.cp > 1 else []),
        *([f"EP {mesh.ep}"] if mesh.ep > 1 else []),
        *_data_parallel(plan),
    ]
    rest = [f"{plan.pipeline.microbatches} micro-batches"] if plan.pipeline.microbatches > 1 else []
    if plan.activations.policy != "none":
        rest.append(_recompute(plan))
    if plan.activations.sequence_chunk:
        rest.append(f"MLPs in chunks of {plan.activations.sequence_chunk:,} positions")
    if plan.float8.linears != "none":
        rest.append("float8 linears" + ("" if plan.float8.linears == "all" else f" ({plan.float8.linears})"))
    if plan.offload.optimizer != "none":
        late = ", one step late" if plan.offload.delayed else ""
        masters = ", masters too" if plan.offload.masters == "host" else ""
        rest.append(f"optimizer on {plan.offload.optimizer}{late}{masters}")
    if plan.offload.parameters != "none":
        rest.append("weights on the host")
    number = plan.activations.offload_blocks
    if plan.activations.offload != "none" and plan.activations.policy != "none":
        rest.append("block inputs on the host")
    if number:
        rest.append(f"saved tensors of {number} block{'' if number == 1 else 's'} on the host")
    if plan.activations.partition:
        rest.append("block inputs partitioned over TP")
    return ", ".join([" x ".join(parts) or "one device", *rest])


def _recompute(plan: Plan) -> str:
    mixture = plan.activations.mixture
    if mixture is None:
        return f"{plan.activations.policy} recompute"
    counted = [f"{count} {name}" for count, name in zip(mixture, ("full", "selective"), strict=True) if count]
    return f"recompute of {' + '.join(counted)} blocks" if counted else "no block recomputed"


def _mode(plan: Plan) -> str:
    return "" if plan.tensor_parallel.mode == "1d" else f" ({plan.tensor_parallel.mode})"


def _groups(plan: Plan) -> str:
    """Of ranks that exchange heads."""
    policy = plan.context_parallel
    return "" if policy.ulysses == 1 else f" (ulysses {policy.ulysses} x {policy.attention})"


def _schedule(plan: Plan) -> str:
    stages, blocks = plan.pipeline.virtual_stages, plan.pipeline.blocks or ()
    by_hand = f", {' + '.join(map(str, blocks))} blocks" if blocks else ""
    return plan.pipeline.schedule + (f", {stages} stages per rank" if stages > 1 else "") + by_hand


def _data_parallel(plan: Plan) -> list[str]:
    mesh, zero, near = plan.mesh, plan.data_parallel.zero, plan.data_parallel.reduce_neighbours
    if zero == 0:
        first = f", gradients summed among {near} first" if near else ""
        return [f"DDP {mesh.dp_replicate}{first}"] if mesh.dp_replicate > 1 else []
    name = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP)"}[zero]
    shards = f"{name} {mesh.dp_shard}" if mesh.dp_shard > 1 else f"{name} over CP"
    size = plan.data_parallel.secondary_shard
    again = [f"backward gathers among {size}"] if size else []
    again += [f"gradients summed among {near} first"] if near else []
    return [shards, *again, *([f"{mesh.dp_replicate} replicas"] if mesh.dp_replicate > 1 else [])]
