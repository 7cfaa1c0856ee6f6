"""Matmuls on a cube of side q (mode 3d, Bian et al., arXiv 2105.14450), between two layouts of activations.

    P: rows chunk (i, j), features chunk k          Q: rows chunk (i, k), features chunk j

| linear | gathers x over | gathers the weight over | reduce-scatters the product over | weight: inputs, outputs |
| ------ | -------------- | ----------------------- | -------------------------------- | ----------------------- |
| P to Q | "j"            | "i"                     | "k"                              | chunk k, chunk j        |
| Q to P | "k"            | "i"                     | "j"                              | chunk j, chunk k        |

A rank stores the i-th shard of its block's outputs, 1 / q^3 of the matrix. The backward gathers again and saves no
gathered tensor: the saved inputs are 1 / q^3 too. Sums over ranks have the product's precision. Gradients of weights
are complete; those of biases are over this rank's rows, to be summed after the backward: "ik" of P to Q, "ij" of Q
to P.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.shards import even_span
from weft.engine.collectives import gathered, scattered
from weft.engine.tp.grid import Grid
from weft.engine.tp_grid.embedding import logits_span
from weft.engine.tp_grid.summa import product


def linear_pq(x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, *, is_transposed: bool = False) -> Tensor:
    """From layout P to Q. `is_transposed`: weight stored as [inputs, outputs]."""
    return _linear(x, weight, bias, grid, ("j", "k"), is_transposed)


def linear_qp(x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, *, is_transposed: bool = False) -> Tensor:
    """From layout Q to P."""
    return _linear(x, weight, bias, grid, ("k", "j"), is_transposed)


def head(x: Tensor, table: Tensor, bias: Tensor | None, grid: Grid, *, vocabulary: int) -> Tensor:
    """Logits in layout Q, the vocabulary's chunk j, from a table [vocabulary chunk j q + i, hidden chunk k] that may be
    the embedding's. Uneven chunks are padded for the collectives and narrowed afterwards."""
    chunk = even_span(vocabulary, degree=grid.sizes["i"] ** 2, place=0).size
    padded = F.pad(table, (0, 0, 0, chunk - table.shape[0])) if table.shape[0] < chunk else table
    out = _linear(x, padded, None, grid, ("j", "k"), is_transposed=False)
    size = logits_span(grid, vocabulary).size
    out = out.narrow(-1, 0, size) if size < out.shape[-1] else out
    return out if bias is None else out + bias


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, grid: Grid, way: tuple[str, str], is_transposed: bool
) -> Tensor:
    out: Tensor = _CubeLinear.apply(x, weight, grid, way, is_transposed)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias


class _CubeLinear(torch.autograd.Function):
    """`way`: the coordinate that x is gathered over, and the one that the product is reduce-scattered over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grid: Grid, way: tuple[str, str], is_transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.grid, ctx.way, ctx.is_transposed = grid, way, is_transposed
        block = _gathered_block(weight, grid, is_transposed)
        inputs = gathered(x, grid.group(way[0]), 0)
        found = product(inputs.flatten(0, -2), block if is_transposed else block.T)
        return scattered(found.view(*inputs.shape[:-1], found.shape[-1]), grid.group(way[1]), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grid, is_transposed = ctx.grid, ctx.is_transposed
        rows, scattered_over = (grid.group(name) for name in ctx.way)
        grads = gathered(grad, scattered_over, 0)
        own_x = own_weight = None
        if ctx.needs_input_grad[0]:
            block = _gathered_block(weight, grid, is_transposed)
            own_x = scattered(grads @ (block.T if is_transposed else block), rows, 0)
        if ctx.needs_input_grad[1]:
            inputs = gathered(x, rows, 0).flatten(0, -2)
            grads = grads.flatten(0, -2)
            found = inputs.T @ grads if is_transposed else grads.T @ inputs
            own_weight = scattered(found, grid.group("i"), 1 if is_transposed else 0)
        return own_x, own_weight, None, None, None


def _gathered_block(weight: Tensor, grid: Grid, is_transposed: bool) -> Tensor:
    """The block, from the shards of its outputs along i."""
    return gathered(weight, grid.group("i"), 1 if is_transposed else 0)
