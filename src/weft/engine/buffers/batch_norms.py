"""The batch norms of a model under a plan: their names, the ranks of their statistics, a note to the user."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from weft.core.errors import MeshError, TensorParallelError
from weft.core.plan import Plan
from weft.engine.dp.batch_norm import find_batch_norms, span_ranks
from weft.engine.mesh import Topology


@dataclass(frozen=True, kw_only=True)
class BatchNorms:
    """`group`: the ranks over which statistics are computed; None for each rank alone."""

    names: tuple[str, ...] = ()
    group: dist.ProcessGroup | None = None
    notes: tuple[str, ...] = ()


def apply_batch_norms(model: nn.Module, plan: Plan, topology: Topology) -> BatchNorms:
    """Compute statistics over all data-parallel ranks. Collective."""
    names = tuple(find_batch_norms(model))
    if not names:
        return BatchNorms()
    _require_all_tokens(plan, names[0])
    group = topology.new_data_group() if topology.dp_degree > 1 else None
    if group is not None:
        span_ranks(model, names, group)
    rows = "a micro-batch" if plan.pipeline.microbatches > 1 else "the batch"
    ranks = f" on all {topology.dp_degree} data-parallel ranks" if group is not None else ""
    note = (
        f"{len(names)} batch norms take their statistics over the rows of {rows}{ranks}:"
        " with another pipeline.microbatches the curve differs"
    )
    return BatchNorms(names=names, group=group, notes=(note,))


def _require_all_tokens(plan: Plan, name: str) -> None:
    """Tensor-parallel ranks that shard tokens or rows would silently take statistics of their shard alone."""
    if plan.mesh.cp > 1:
        raise MeshError(
            f"{name} is a batch norm, whose statistics need all tokens; mesh.cp divides them over ranks",
            hint="use mesh.cp = 1",
        )
    policy = plan.tensor_parallel
    if plan.mesh.tp > 1 and (policy.mode != "1d" or policy.sequence_parallel):
        sharded_by = "sequence parallel" if policy.mode == "1d" else f"mode {policy.mode!r}"
        raise TensorParallelError(
            f"{name} is a batch norm, whose statistics need all tokens; {sharded_by} shards tokens over ranks",
            hint="set tensor_parallel.mode = '1d' and sequence_parallel = false, or mesh.tp = 1",
        )
