"""Float8 matmuls of the reference: operands rounded to float8 and back, then multiplied in float32. No float8 kernel.

The engine chooses the layers (`engine.kernels.float8.chosen_linears`); the arithmetic is written here independently:
forward operands in e4m3, output gradients in e5m2, one scale per tensor from its largest magnitude.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.plan import Float8Choice
from weft.engine.kernels.float8 import chosen_linears
from weft.models.layout import describe


def multiply_in_float8(model: nn.Module, choice: Float8Choice) -> None:
    """Make the chosen linear layers of `model`'s blocks multiply in float8."""
    for name, is_chosen in chosen_linears(model, describe(model), choice).items():
        if is_chosen:
            linear = model.get_submodule(name)
            linear.register_forward_hook(_recompute)


def _recompute(linear: nn.Module, args: tuple[Tensor, ...], plain: Tensor) -> Tensor:
    """Forward hook: replace the layer's output."""
    out: Tensor = _Rounded.apply(args[0], linear.weight)  # type: ignore[no-untyped-call]
    return out if linear.bias is None else out + linear.bias  # type: ignore[operator]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        inputs, weight = (rounded(tensor, torch.float8_e4m3fn) for tensor in given)
        ctx.save_for_backward(inputs, weight)
        ctx.dtype = given[0].dtype
        return torch.einsum("...i,oi->...o", inputs, weight).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        gradient = rounded(arriving[0], torch.float8_e5m2)
        by_input = torch.einsum("...o,oi->...i", gradient, weight)
        by_weight = torch.einsum("no,ni->oi", gradient.flatten(0, -2), inputs.flatten(0, -2))
        return by_input.to(ctx.dtype), by_weight.to(ctx.dtype)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest float8 numbers at the tensor's own scale, as float32."""
    largest = values.abs().max().float()
    if largest == 0:
        return torch.zeros_like(values, dtype=torch.float32)
    scale = torch.finfo(dtype).max / largest
    return (values.float() * scale).to(dtype).float() / scale
