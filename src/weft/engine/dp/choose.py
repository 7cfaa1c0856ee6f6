"""Chooses the strategy of a plan's data parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from weft.comm.coded_sums import CodedSum
from weft.comm.sums import BACKEND, GroupSum
from weft.core import axes
from weft.core.plan import Plan
from weft.engine.dp.ddp import Replicated
from weft.engine.dp.float8_gather import gather_in_float8
from weft.engine.dp.pipeline_replicas import Summed
from weft.engine.dp.sharded import Sharded
from weft.engine.dp.strategy import Strategy
from weft.engine.dp.threads import Threaded
from weft.engine.mesh import Topology


def choose_strategy(model: nn.Module, plan: Plan, topology: Topology) -> Strategy:
    dp = plan.data_parallel
    if dp.zero > 0:
        replicas = _between_shards(plan, topology)
        near = topology.new_neighbours(dp.secondary_shard) if dp.secondary_shard else None
        sharded = Sharded(
            model,
            stage=dp.zero,
            replicas=replicas,
            reduce=plan.precision.policy().reduce,
            gather=plan.coded_gather,
            neighbours=near,
            feeds_back=dp.error_feedback,
            nodes=topology.new_nodes(dp.reduce_neighbours, (axes.DP_SHARD,)) if dp.reduce_neighbours else None,
        )
        if plan.float8.linears != "none" and plan.float8.gather == "float8":
            sharded.float8 = gather_in_float8(model, plan.precision.policy())
        return sharded
    if dp.is_threaded:
        return Threaded(model)
    if dist.get_world_size(topology.gradient_group) == 1:
        return Strategy(model)
    if topology.pp_degree > 1:
        sums = _between_ranks(plan, topology)
        return Summed(model, sums=sums, bucket_bytes=dp.bucket_bytes, feeds_back=dp.error_feedback)
    return Replicated(
        model,
        sums=_between_ranks(plan, topology),
        find_unused_parameters=dp.find_unused_parameters,
        bucket_bytes=dp.bucket_bytes,
        feeds_back=dp.error_feedback,
    )


def _between_ranks(plan: Plan, topology: Topology) -> GroupSum:
    """The sum over all ranks with different rows, or different positions of them."""
    if plan.precision.policy().has_coded_sums:
        near = plan.data_parallel.reduce_neighbours
        nodes = topology.new_nodes(near, axes.DATA_AXES) if near else None
        return CodedSum(topology.gradient_group, name=plan.precision.policy().reduce, nodes=nodes)
    name = plan.data_parallel.all_reduce
    ways = topology.new_ways(axes.DATA_AXES) if name != BACKEND else None
    return GroupSum(topology.gradient_group, algorithm=name, ways=ways)


def _between_shards(plan: Plan, topology: Topology) -> GroupSum | None:
    """The sum over the replicas of a pipeline's shards; None where `fully_shard` has it."""
    group, name = topology.replicas_beside_shards, plan.data_parallel.all_reduce
    if group is None:
        return None
    if plan.precision.policy().has_coded_sums:
        return CodedSum(group, name=plan.precision.policy().reduce)
    ways = topology.new_ways((axes.DP_REPLICATE,)) if name != BACKEND else None
    return GroupSum(group, algorithm=name, ways=ways)
