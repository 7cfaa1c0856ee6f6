"""Moves rows between the order of tokens and another one, with gradients that are gathered, not added in place.

A token has `k` slots; a row belongs to one slot of one token. `RowOrder` says which, both ways:

| function    | forward                                   | backward                                                   |
| ----------- | ----------------------------------------- | ---------------------------------------------------------- |
| `take_rows` | a row = its token                         | of a token: the sum over its slots                         |
| `sum_rows`  | a token = the weighted sum over its slots | of a row: its weight x that of its token; of a weight: the |
|             |                                           | inner product of its row and the gradient of its token     |

Every output element has one writer that adds in the order of slots, in float32 at least: the same bits in every run.
The operators are torch's own custom ones, so a dry run sees what the GPU kernels (`rows_triton.py`) allocate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.engine.kernels.triton_here import has_triton


@dataclass(frozen=True)
class RowOrder:
    """`slots` [rows]: the slot of each row; `rows` [tokens, k]: the row of each slot, -1 without one."""

    slots: Tensor
    rows: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.slots // self.rows.shape[1]

    def first(self, num_rows: int) -> RowOrder:
        return RowOrder(self.slots[:num_rows], self.rows)


def sorted_order(keys: Tensor, num_rows: int | None = None) -> RowOrder:
    """Rows by ascending key, then by slot; `keys` [tokens, k] are negative for the slots without a row.

    Without `num_rows`, slots without a row come last: `RowOrder.first` leaves them out once their number is known.
    """
    flat = keys.flatten().to(torch.int32)
    last = torch.where(flat < 0, torch.iinfo(torch.int32).max, flat)
    slots = torch.argsort(last, stable=True)
    rows = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=flat.device))
    order = RowOrder(slots, torch.where(flat < 0, -1, rows).view(keys.shape))
    return order if num_rows is None else order.first(num_rows)


def take_rows(values: Tensor, order: RowOrder) -> Tensor:
    return _TakeRows.apply(values, order)  # type: ignore[no-any-return, no-untyped-call]


def sum_rows(values: Tensor, order: RowOrder, weights: Tensor | None = None) -> Tensor:
    """`weights` [tokens, k]; ones if None."""
    return _SumRows.apply(values, weights, order)  # type: ignore[no-any-return, no-untyped-call]


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, order: RowOrder) -> Tensor:
        ctx.save_for_backward(order.rows)
        return values.index_select(0, order.tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return add_slots(gradient.contiguous(), rows), None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor | None, order: RowOrder) -> Tensor:
        weights = weights if weights is None else weights.contiguous()
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, weights, order.slots, order.rows)
        return add_slots(values.contiguous(), order.rows, weights)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weights, slots, rows = ctx.saved_tensors
        gradient = gradient.contiguous()
        if weights is None:
            return gradient.index_select(0, slots // rows.shape[1]), None, None
        of_values, of_weights = _spread(gradient, slots, weights, values)
        return of_values, None if values is None else of_weights.to(weights.dtype), None


def _has_kernel(values: Tensor) -> bool:
    return values.is_cuda and values.dtype != torch.float64 and has_triton()


@torch.library.custom_op("weft::add_slots", mutates_args=())
def add_slots(values: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """[tokens, width]: the sum over slots of weight x value."""
    if _has_kernel(values):
        from weft.engine.ep import rows_triton

        return rows_triton.add_slots(values, rows, weights)
    token, slot = torch.nonzero(rows >= 0, as_tuple=True)
    wide = torch.promote_types(values.dtype, torch.float32)
    made = values[rows[token, slot]].to(wide)
    if weights is not None:
        made *= weights[token, slot].unsqueeze(1)
    return made.new_zeros(len(rows), values.shape[1]).index_add_(0, token, made).to(values.dtype)


@torch.library.custom_op("weft::spread_tokens", mutates_args=())
def _spread(tokens: Tensor, slots: Tensor, weights: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    """[rows, width]: weight x token of each row; [tokens, k]: inner products of tokens and `values` [rows, width].

    The products are of float32 at least, and 0 for slots without a row or without `values`.
    """
    wide = torch.promote_types(tokens.dtype, torch.float32)
    products = torch.zeros(weights.shape, dtype=wide, device=tokens.device)
    if _has_kernel(tokens):
        from weft.engine.ep.rows_triton import spread

        return spread(tokens, slots, weights, values, products), products
    given = tokens[slots // weights.shape[1]].to(wide)
    if values is not None:
        products.view(-1)[slots] = (given * values.to(wide)).sum(1)
    return (given * weights.flatten()[slots].unsqueeze(1)).to(tokens.dtype), products


@add_slots.register_fake
def _(values: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    return values.new_empty(len(rows), values.shape[1])


@_spread.register_fake
def _(tokens: Tensor, slots: Tensor, weights: Tensor, values: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(tokens.dtype, torch.float32)
    return tokens.new_empty(len(slots), tokens.shape[1]), tokens.new_empty(weights.shape, dtype=wide)
