"""Collectives of `fully_shard` whose numbers travel as codes, through its public hooks (`comm/codes.py`).

`fully_shard` lays the gradients of a unit out as [ranks, share of each rank], in float32, where micro-batches also
accumulate. Shares are encoded, sent and summed; units of one rank are not reduced at all. Weights of a unit are
gathered as one message per rank, in blocks over its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.coded_sums import gather_codes, scatter_sum


class UnitBuffers:
    """Memory for the collectives of a unit, as `fully_shard` allocates its own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CodedAllGather(UnitBuffers):
    """The all-gather of a unit: every rank, the owner too, computes with what the codes say."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        gather_codes(output_tensor.view(group.size(), -1), input_tensor, group, self._name)


class CodedReduceScatter(UnitBuffers):
    """The reduce-scatter of a unit, one rounding per gradient and rank: the interface of `set_custom_reduce_scatter`,
    whose base class torch does not export."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(scatter_sum(input_tensor.view(group.size(), -1), group, self._name))
