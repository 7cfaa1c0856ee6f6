"""The GPU kernels of `rows.py`: each reads the rows it needs once and writes its output once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048


def add_slots(values: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    made = values.new_empty(len(rows), values.shape[1])
    if made.numel():
        _add_slots[_grid(made)](
            values,
            rows,
            weights,
            made,
            made.shape[1],
            k=rows.shape[1],
            has_weights=weights is not None,
            block=_block(made),
        )
    return made


def spread(tokens: Tensor, slots: Tensor, weights: Tensor, values: Tensor | None, products: Tensor) -> Tensor:
    """The rows; inner products with `values` are written to `products`."""
    made = tokens.new_empty(len(slots), tokens.shape[1])
    if made.numel():
        _spread[(len(made),)](
            tokens, slots, weights, values, made, products, made.shape[1], weights.shape[1],
            has_values=values is not None, block=_block(made),
        )  # fmt: skip
    return made


def _block(values: Tensor) -> int:
    return min(MAX_BLOCK, 1 << (values.shape[1] - 1).bit_length())


def _grid(made: Tensor) -> tuple[int, int]:
    return (len(made), triton.cdiv(made.shape[1], _block(made)))


@triton.jit
def _add_slots(values, rows, weights, made, width, k: tl.constexpr, has_weights: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), dtype=tl.float32)
    for slot in range(k):
        row = tl.load(rows + token * k + slot)
        value = tl.load(values + row * width + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        if has_weights:
            value *= tl.load(weights + token * k + slot).to(tl.float32)
        total += value
    tl.store(made + token * width + column, total.to(made.dtype.element_ty), mask=inside)


@triton.jit
def _spread(tokens, slots, weights, values, made, products, width, k, has_values: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    weight = tl.load(weights + slot).to(tl.float32)
    product = tl.zeros((block,), dtype=tl.float32)
    for begin in range(0, width, block):
        column = begin + tl.arange(0, block)
        inside = column < width
        token = tl.load(tokens + (slot // k) * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(made + row * width + column, (token * weight).to(made.dtype.element_ty), mask=inside)
        if has_values:
            product += token * tl.load(values + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if has_values:
        tl.store(products + slot, tl.sum(product))
