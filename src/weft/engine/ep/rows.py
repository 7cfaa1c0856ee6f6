"""Sums and permutations of rows that keep only the order for their backward.

The derivatives of torch's `index_add` and `index_copy` keep their source for its shape: one more tensor of all rows per
layer, for a sum in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def add_rows(values: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """The sum of all `values` of each row, in float32 at least."""
    return _AddRows.apply(values, row, num_rows)  # type: ignore[no-any-return, no-untyped-call]


def unsort_rows(values: Tensor, order: Tensor) -> Tensor:
    """`values` at the places of `order`, a permutation: the inverse of `values[order]`."""
    return _UnsortRows.apply(values, order)  # type: ignore[no-any-return, no-untyped-call]


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, row: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(row)
        wide = torch.promote_types(values.dtype, torch.float32)
        total = torch.zeros(num_rows, values.shape[1], dtype=wide, device=values.device)
        return total.index_add_(0, row, values.to(wide)).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (row,) = ctx.saved_tensors
        return gradient.index_select(0, row), None, None


class _UnsortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return torch.empty_like(values).index_copy_(0, order, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order), None
