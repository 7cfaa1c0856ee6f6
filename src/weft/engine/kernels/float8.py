"""Matmuls in float8: chosen linear layers quantise their operands, one scale per tensor, in forward and backward.

    y = x w^T      x, w in e4m3 (448 at most)         scale = 448 / largest magnitude, of this very tensor
    dx = g w       g in e5m2 (57344 at most), w as before
    dw = g^T x     g, x as before; all sums in float32, all results in the dtype of x

Weights, norms, routers, the head and the loss keep their precision. `core/float8.py` chooses the layers that gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import DeviceError
from weft.core.float8 import takes_float8
from weft.core.plan import Float8Choice
from weft.models.layout import ModelLayout

FIRST_CAPABILITY = (8, 9)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def apply_float8(
    model: nn.Module, layout: ModelLayout, choice: Float8Choice, *, device: torch.device
) -> dict[str, bool]:
    """Every linear layer of the blocks by name, and whether it multiplies in float8 from now on; empty for "none".

    The sizes of a layer decide: where speed matters, micro-batches have more rows than layers have columns.
    """
    chosen = chosen_linears(model, layout, choice)
    if any(chosen.values()):
        _require_float8(device)
    for name, is_chosen in chosen.items():
        if is_chosen:  # the same parameters under the same names, with another forward
            model.get_submodule(name).__class__ = Float8Linear
    return chosen


def _require_float8(device: torch.device) -> None:
    """A GPU without float8 units would fail in the first matmul; a CPU multiplies the rounded values."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has no float8 matmuls",
            hint="they need Ada or Hopper (capability 8.9); set float8.linears = 'none'",
        )


def chosen_linears(model: nn.Module, layout: ModelLayout, choice: Float8Choice) -> dict[str, bool]:
    """The choice of `apply_float8`, without applying it."""
    if choice == "none":
        return {}
    return {
        name: takes_float8(linear.in_features, linear.out_features, choice) for name, linear in _linears(model, layout)
    }


class Float8Linear(nn.Linear):
    """A linear layer whose three matmuls are in float8."""

    # the weight and its scale, if it is gathered in float8: the parameter has no values then
    gathered: Tensor | None = None
    gathered_scale: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        w, w_scale = self.gathered, self.gathered_scale
        if w is None or w_scale is None:
            w, w_scale = quantise(self.weight.detach(), E4M3)
        out: Tensor = _Product.apply(rows, self.weight, w, w_scale)  # type: ignore[no-untyped-call]
        out = out.view(*input.shape[:-1], -1)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """The product of rows and a quantised weight; the gradient goes to the unquantised weight."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        rows, _, w, w_scale = given
        x, x_scale = quantise(rows, E4M3)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        return _multiply(x, w.t(), x_scale, w_scale, rows.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        (gradient,) = arriving
        g, g_scale = quantise(gradient, E5M2)
        d_rows = _multiply(g, _columns_first(w), g_scale, w_scale, gradient.dtype, is_fast=False)
        d_weight = _multiply(g.t().contiguous(), _columns_first(x), g_scale, x_scale, gradient.dtype, is_fast=False)
        return d_rows, d_weight, None, None


def quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` in `dtype`, and the factor that restores them; a tensor of zeros stays zero."""
    most, scale = torch.finfo(dtype).max, scale_of(values.abs().amax(), dtype)
    return (values.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that maps the largest magnitude to the largest number of `dtype`."""
    return torch.finfo(dtype).max / largest.float().clamp(min=1e-12)


def _columns_first(matrix: Tensor) -> Tensor:
    """The same matrix in column-major layout, which the hardware requires of a right operand."""
    return matrix.t().contiguous().t()


def _multiply(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, is_fast: bool
) -> Tensor:
    """`is_fast` sums partly in lower precision: right for activations, too inexact for gradients."""
    if left.is_cuda:
        return multiply_on_gpu(left, right, left_scale, right_scale, dtype, is_fast=is_fast)
    return ((left.float() * left_scale) @ (right.float() * right_scale)).to(dtype)


def multiply_on_gpu(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype, *, is_fast: bool
) -> Tensor:
    # private, no public form: tests/gpu/test_fast_path_gpu.py fails when it moves
    return torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=is_fast
    )


def _linears(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, nn.Linear]]:
    for block in layout.blocks:
        for name, module in model.get_submodule(block).named_modules():
            if type(module) is nn.Linear:
                yield f"{block}.{name}", module
