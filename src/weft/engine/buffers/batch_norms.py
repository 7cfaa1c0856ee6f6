"""A model's batch norms under a plan: which there are, whose rows they see, and what the user should know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from weft.core.errors import TensorParallelError
from weft.core.plan import Plan
from weft.engine.dp.batch_norm import find_batch_norms, span_ranks
from weft.engine.mesh import Topology


@dataclass(frozen=True, kw_only=True)
class BatchNorms:
    """`group`: the ranks over which statistics are taken; None where a rank takes its own."""

    names: tuple[str, ...] = ()
    group: dist.ProcessGroup | None = None
    notes: tuple[str, ...] = ()


def apply_batch_norms(model: nn.Module, plan: Plan, topology: Topology) -> BatchNorms:
    """Statistics over all data-parallel ranks. Collective."""
    names = tuple(find_batch_norms(model))
    if not names:
        return BatchNorms()
    _require_whole_rows(plan, names[0])
    group = topology.new_data_group() if topology.dp_degree > 1 else None
    if group is not None:
        span_ranks(model, names, group)
    rows = "a micro-batch" if plan.pipeline.microbatches > 1 else "the batch"
    whose = f" on all {topology.dp_degree} data-parallel ranks" if group is not None else ""
    said = f"{len(names)} batch norms take their statistics over the rows of {rows}{whose}"
    note = f"{said}: with another pipeline.microbatches the curve is another"
    return BatchNorms(names=names, group=group, notes=(note,))


def _require_whole_rows(plan: Plan, name: str) -> None:
    """Where tensor-parallel ranks share out tokens or rows a batch norm would see a part of them, and say nothing."""
    policy = plan.tensor_parallel
    if plan.mesh.tp > 1 and (policy.mode != "1d" or policy.sequence_parallel):
        what = "sequence parallel" if policy.mode == "1d" else f"mode {policy.mode!r}"
        raise TensorParallelError(
            f"{name} is a batch norm, whose statistics need all tokens, which {what} deals out to ranks",
            hint="set tensor_parallel.mode = '1d' and sequence_parallel = false, or mesh.tp = 1",
        )
