"""Collectives of `fully_shard` whose numbers travel as codes, through its public hooks (`comm/codes.py`).

`fully_shard` lays the gradients of a unit out as [ranks, share of each rank], in float32, where micro-batches also
accumulate. Shares are encoded, sent and summed; units of one rank are not reduced at all. Weights of a unit are
gathered as one message per rank. Blocks are those of a rank's share of each parameter (`comm/codes.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from weft.comm.coded_sums import CodedSum, Nodes, gather_codes, scatter_sum
from weft.comm.sums import GroupSum
from weft.core.errors import PlanError
from weft.core.shards import LocalShard
from weft.core.wire_bytes import CODED
from weft.engine.dp.reduce_scatter_copy import sizes_in


class UnitBuffers:
    """Memory for the collectives of a unit, as `fully_shard` allocates its own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CodedAllGather(UnitBuffers):
    """The all-gather of a unit: every rank, the owner too, computes with what the codes say."""

    def __init__(self, name: str, sizes: tuple[int, ...]) -> None:
        """`sizes`: of a rank's shards of the unit's parameters, in the order of the gather."""
        self._name, self._sizes = name, sizes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        gather_codes(output_tensor.view(group.size(), -1), input_tensor, group, self._name, self._sizes)


class CodedReduceScatter(UnitBuffers):
    """The reduce-scatter of a unit, one rounding per gradient and rank: the interface of `set_custom_reduce_scatter`,
    whose base class torch does not export. `errors` [ranks, share of each rank]: with error feedback."""

    def __init__(self, name: str, *, unit: str, errors: Tensor | None = None, nodes: Nodes | None = None) -> None:
        self._name, self._unit, self._errors, self._nodes = name, unit, errors, nodes

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        shares = input_tensor.view(group.size(), -1)
        if self._errors is not None and self._errors.shape != shares.shape:
            raise PlanError(
                f"a parameter of {self._unit} got no gradient in this backward, and error feedback needs the same "
                "gradients in every one",
                hint="set data_parallel.error_feedback = false, or freeze unused parameters (train.frozen)",
            )
        sizes, unit, nodes = sizes_in(input_tensor), self._unit, self._nodes
        summed = scatter_sum(shares, group, self._name, self._errors, sizes=sizes, place=unit, nodes=nodes)
        output_tensor.copy_(summed)


def errors_of_unit(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Zeros for the errors of a unit's reduce-scatters: [ranks, elements of a share], as `fully_shard` lays gradients
    out. None where nothing is reduced."""
    trained = [one for one in parameters if one.requires_grad and isinstance(one, DTensor)]
    if not trained or (ranks := trained[0].device_mesh.size()) == 1:
        return None
    count = 0
    for one in trained:
        placement = one.placements[-1]
        size = one.shape[placement.dim if isinstance(placement, Shard) else 0]
        count += -(-size // ranks) * (one.numel() // max(size, 1))
    return torch.zeros(ranks, count, device=trained[0].device)


def errors_of_buckets(sums: GroupSum, sizes: Sequence[int], *, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for the errors of gradients in these buckets, if they travel as codes."""
    if not isinstance(sums, CodedSum):
        return {}
    sums.feed_back(sizes, device=device)
    return {f"bucket {index}": errors for index, errors in enumerate(sums.errors)}


def require_equal_copies(shards: Mapping[str, LocalShard], name: str | None) -> None:
    """Refuse weights in codes where a parameter has repeated heads beside others: their blocks would be shared."""
    if name not in CODED:
        return
    for parameter, shard in shards.items():
        if len({chunk.copies for chunk in shard.chunks}) > 1:
            raise PlanError(
                f"{parameter} has key-value heads that several tensor-parallel ranks repeat beside heads of one rank: "
                f"gathered in {name} their copies would differ",
                hint="remove precision.gather, or lower mesh.tp to a divisor of the key-value heads",
            )
