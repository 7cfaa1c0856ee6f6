"""Collectives of `fully_shard` whose numbers travel as codes, through its public hooks (`comm/codes.py`).

`fully_shard` lays the gradients of a unit out as [ranks, share of each rank], in float32, where micro-batches also
accumulate. Shares are encoded, sent and summed; units of one rank are not reduced at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.coded_sums import scatter_sum


class CodedReduceScatter:
    """The reduce-scatter of a unit, one rounding per gradient and rank: the interface of `set_custom_reduce_scatter`,
    whose base class torch does not export."""

    def __init__(self, name: str) -> None:
        self._name = name

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(scatter_sum(input_tensor.view(group.size(), -1), group, self._name))
