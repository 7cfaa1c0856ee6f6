"""The GPU kernel of `adamw_low_update`: one program per block of elements, the same numbers as the plain form.

Imported only on machines with a GPU: Triton comes with torch's CUDA builds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from weft.engine.optim.rounding_bits import FACTORS, SHIFTS

if TYPE_CHECKING:
    from weft.engine.optim.adamw_low_update import Constants

BLOCK, WARPS = 1024, 4


def launch(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    factor: torch.Tensor | None,
    words: tuple[int, int],
    step: int,
    constants: Constants,
    *,
    first: int,
    row_step: int,
) -> None:
    """Tensors of [rows, columns] whose rows are contiguous."""
    rows, columns = weight.shape
    tensors = (weight, gradient, exp_avg, exp_avg_sq)
    if any(tensor.stride() != weight.stride() for tensor in tensors) or (columns > 1 and weight.stride(1) != 1):
        raise ValueError("weights, gradients and moments must have equal strides and contiguous rows")
    _update[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        gradient,
        exp_avg,
        exp_avg_sq,
        factor if factor is not None else weight,  # not read
        weight.numel(),
        columns,
        weight.stride(0),
        first,
        row_step,
        _signed(words[0]),
        _signed(words[1]),
        1.0 - constants.beta1,
        constants.beta2,
        1.0 - constants.beta2,
        1.0 - constants.learning_rate * constants.decay,
        constants.step_size(step),
        constants.root_correction(step),
        constants.epsilon,
        has_factor=factor is not None,
        is_flat=rows == 1,
        rounds_square=exp_avg_sq.dtype == torch.bfloat16,
        rounds_weight=weight.dtype == torch.bfloat16,
        shift0=SHIFTS[0],
        shift1=SHIFTS[1],
        shift2=SHIFTS[2],
        factor0=_signed(FACTORS[0]),
        factor1=_signed(FACTORS[1]),
        block=BLOCK,
        num_warps=WARPS,
    )


def _signed(word: int) -> int:
    """32 bits as a signed number, so that every word has one type."""
    return word - 2**32 if word >= 2**31 else word


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    values,
    shift0: tl.constexpr,
    shift1: tl.constexpr,
    shift2: tl.constexpr,
    factor0: tl.constexpr,
    factor1: tl.constexpr,
):
    """On uint32."""
    values = (values ^ (values >> shift0)) * tl.full([], factor0, tl.int32).to(tl.uint32, bitcast=True)
    values = (values ^ (values >> shift1)) * tl.full([], factor1, tl.int32).to(tl.uint32, bitcast=True)
    return values ^ (values >> shift2)


@triton.jit
def _round(values, bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 to bfloat16: add 16 random bits below, then take the upper half; NaN stays."""
    raised = (values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(values == values, raised.to(tl.float32, bitcast=True), values).to(dtype)


@triton.jit(do_not_specialize=["first", "row_step", "word0", "word1"])
def _update(  # type: ignore[no-untyped-def]
    weights,
    gradients,
    means,
    squares,
    factors,
    num_elements,
    columns,
    stride,
    first,
    row_step,
    word0,
    word1,
    rest1,
    beta2,
    rest2,
    keep,
    step_size,
    root_correction,
    epsilon,
    has_factor: tl.constexpr,
    is_flat: tl.constexpr,
    rounds_square: tl.constexpr,
    rounds_weight: tl.constexpr,
    shift0: tl.constexpr,
    shift1: tl.constexpr,
    shift2: tl.constexpr,
    factor0: tl.constexpr,
    factor1: tl.constexpr,
    block: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < num_elements
    if is_flat:
        place = at
        element = first + at
    else:
        row = at // columns
        column = at - row * columns
        place = row * stride + column
        element = first + row * row_step + column
    gradient = tl.load(gradients + place, mask=inside, other=0.0).to(tl.float32)
    if has_factor:
        gradient = gradient * tl.load(factors).to(tl.float32)
    mean = tl.load(means + place, mask=inside, other=0.0).to(tl.float32)
    mean = mean + (gradient - mean) * rest1
    square = tl.load(squares + place, mask=inside, other=0.0).to(tl.float32)
    square = square * beta2 + gradient * gradient * rest2
    weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    weight = weight * keep - step_size * (mean / (tl.sqrt(square) / root_correction + epsilon))

    bits = _mix(element.to(tl.uint32) ^ word0.to(tl.uint32, bitcast=True), shift0, shift1, shift2, factor0, factor1)
    bits = bits + (element >> 32).to(tl.uint32) + word1.to(tl.uint32, bitcast=True)
    bits = _mix(bits, shift0, shift1, shift2, factor0, factor1)
    tl.store(means + place, mean.to(means.dtype.element_ty), mask=inside)
    if rounds_square:
        tl.store(squares + place, _round(square, bits & 0xFFFF, squares.dtype.element_ty), mask=inside)
    else:
        tl.store(squares + place, square, mask=inside)
    if rounds_weight:
        tl.store(weights + place, _round(weight, bits >> 16, weights.dtype.element_ty), mask=inside)
    else:
        tl.store(weights + place, weight, mask=inside)
