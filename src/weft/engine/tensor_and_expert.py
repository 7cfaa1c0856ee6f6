"""Tensor and expert parallelism of one model, whose ranks may be the same ones."""

from __future__ import annotations

from torch import nn

from weft.core import axes
from weft.core.plan import Plan
from weft.engine.ep.apply import apply_expert_parallel, find_experts
from weft.engine.ep.context import EPContext
from weft.engine.mesh import Topology
from weft.engine.tp.apply import apply_tensor_parallel
from weft.engine.tp.context import TPContext
from weft.engine.tp_grid.apply import apply_tensor_grid
from weft.models.layout import ModelLayout


def apply_tensor_and_expert(
    model: nn.Module, plan: Plan, topology: Topology, *, layout: ModelLayout, keep_logits_full: bool
) -> tuple[TPContext | None, EPContext | None]:
    """Tensor parallelism, then expert parallelism, whose ranks may be the same ones."""
    policy, is_folded = plan.tensor_parallel, plan.expert_parallel.tensor == "folded"
    experts = find_experts(model, topology)
    divided = experts.names if experts is not None and is_folded else ()
    tp: TPContext | None = None
    if topology.tp_degree > 1 and policy.mode == "1d":
        tp = apply_tensor_parallel(model, layout, policy, topology, keep_logits_full=keep_logits_full, divided=divided)
    elif topology.tp_degree > 1:
        tp = apply_tensor_grid(model, layout, policy, topology, keep_logits_full=keep_logits_full)
    if experts is None:
        return tp, None
    has_same_rows = tp is not None and is_folded and not policy.sequence_parallel
    ep = apply_expert_parallel(
        model,
        layout,
        experts,
        topology,
        kind=plan.expert_parallel.dispatcher,
        wire=plan.expert_parallel.wire,
        chunks=plan.expert_parallel.chunks,
        is_sharded=plan.data_parallel.zero > 0,
        same_rows=topology.group(axes.TP) if has_same_rows else None,
        tensor_shards=tp.shards if tp is not None else {},
    )
    return tp.with_experts(ep.shards) if tp is not None else None, ep
