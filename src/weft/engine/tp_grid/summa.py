"""Matmuls on a q x q square, panel by panel (SUMMA): the linears of modes 2d and 2.5d.

    C_ij = sum_l A_il B_lj            activations: rows chunk i (2.5d: d q + i), features chunk j
                                      weight: inputs chunk i, outputs chunk j, equal on every layer d

| product                   | along the row "j"        | along the column "i"        |
| ------------------------- | ------------------------ | --------------------------- |
| AB    C_ij = A_il B_lj    | broadcast A_il           | broadcast B_lj              |
| ABT   C_il = A_ij B_lj^T  | reduce to j = l          | broadcast B_lj              |
| ATB   C_lj = A_il^T B_ij  | broadcast A_il           | reduce to i = l             |

Backward: of AB, dA = dC B^T and dB = A^T dC; of ABT, dA = dC B and dB = dC^T A. One panel is held at a time, never a
gathered matrix. Half-precision panels of AB are summed in float32; reductions over ranks are in the panels' precision,
so the bytes are those of Xu et al. (arXiv 2104.05343) and Wang et al. (arXiv 2105.14500). Gradients of biases are over
this rank's rows only, those of weights in 2.5d over this layer's: both are summed after the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.shards import even_span
from weft.engine.tp.grid import Grid


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, *, is_transposed: bool = False) -> Tensor:
    """[rows, ..., inputs chunk j] to [rows, ..., outputs chunk j]; `is_transposed`: weight stored as [inputs, outputs].

    Every chunk of the inputs must be of the same size.
    """
    out = _SummaLinear.apply(x.flatten(0, -2), weight, bias, grid, is_transposed)  # type: ignore[no-untyped-call]
    return out.unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def head(x: Tensor, table: Tensor, bias: Tensor | None, grid: Grid, *, vocabulary: int) -> Tensor:
    """Logits of the vocabulary's chunk j; `table` [vocabulary chunk i, hidden chunk j] may be the embedding's."""
    sizes = [even_span(vocabulary, degree=grid.sizes["j"], place=place).size for place in range(grid.sizes["j"])]
    out = _SummaHead.apply(x.flatten(0, -2), table, grid, sizes)  # type: ignore[no-untyped-call]
    out = out.unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias  # type: ignore[no-any-return]


class _SummaLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, is_transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.is_transposed, ctx.has_bias = grid, is_transposed, bias is not None
        total = None if bias is None else bias.to(_sum_dtype(x.dtype)).expand(x.shape[0], -1).clone()
        for place in range(grid.sizes["j"]):
            panel = _broadcast(x, x.shape, grid, "j", place)
            block = _broadcast(weight, weight.shape, grid, "i", place)
            total = _added(total, product(panel, block if is_transposed else block.T))
        return _done(total, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grid, is_transposed = ctx.grid, ctx.is_transposed
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        own_x = own_weight = None
        for place in range(grid.sizes["j"]):
            if wants_x:
                block = _broadcast(weight, weight.shape, grid, "i", place)
                found = _reduced(grad @ (block.T if is_transposed else block), grid, "j", place)
                own_x = found if found is not None else own_x
            if wants_weight:
                panel = _broadcast(x, x.shape, grid, "j", place)
                found = _reduced(panel.T @ grad if is_transposed else grad.T @ panel, grid, "i", place)
                own_weight = found if found is not None else own_weight
        own_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return own_x, own_weight, own_bias, None, None


class _SummaHead(torch.autograd.Function):
    """`sizes`: tokens of every chunk of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, grid: Grid, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, table)
        ctx.grid, ctx.sizes = grid, sizes
        own = None
        for place, size in enumerate(sizes):
            block = _broadcast(table, (size, table.shape[1]), grid, "i", place)
            found = _reduced(product(x, block.T), grid, "j", place)
            own = found if found is not None else own
        return _present(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, table = ctx.saved_tensors
        grid = ctx.grid
        wants_x, wants_table = ctx.needs_input_grad[:2]
        grad = grad.contiguous()
        total = own_table = None
        for place, size in enumerate(ctx.sizes):
            panel = _broadcast(grad, (grad.shape[0], size), grid, "j", place)
            if wants_x:
                block = _broadcast(table, (size, table.shape[1]), grid, "i", place)
                total = _added(total, panel @ block)
            if wants_table:
                found = _reduced(panel.T @ x, grid, "i", place)
                own_table = found if found is not None else own_table
        return (_done(total, x.dtype) if wants_x else None), own_table, None, None


def product(left: Tensor, right: Tensor) -> Tensor:
    """A matmul as a batch of one: selective recompute saves outputs of mm, and would save every panel."""
    return torch.bmm(left.unsqueeze(0), right.unsqueeze(0)).squeeze(0)


def _broadcast(own: Tensor, shape: Sequence[int], grid: Grid, along: str, place: int) -> Tensor:
    """The block of the rank at `place`, broadcast along a row or a column."""
    # .data: torch 2.11 counts a broadcast as a write at its source too, and refuses the backward that saved it
    block = own.contiguous().data if grid.place[along] == place else own.new_empty(tuple(shape))
    if block.numel():
        dist.broadcast(block, group=grid.group(along), group_src=place)
    return block


def _reduced(partial: Tensor, grid: Grid, along: str, place: int) -> Tensor | None:
    """The sum of the partial products, at `place` alone."""
    partial = partial.contiguous()
    if partial.numel():
        dist.reduce(partial, group=grid.group(along), group_dst=place)
    return partial if grid.place[along] == place else None


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _added(total: Tensor | None, term: Tensor) -> Tensor:
    return term.to(_sum_dtype(term.dtype)) if total is None else total.add_(term)


def _present(value: Tensor | None) -> Tensor:
    if value is None:
        raise RuntimeError("this rank's place is outside of its grid")
    return value


def _done(total: Tensor | None, dtype: torch.dtype) -> Tensor:
    return _present(total).to(dtype)
