"""Float8 of the reference: values rounded to float8 and back, then multiplied in float32. No float8 kernel.

Matmuls: the engine chooses the layers (`engine.kernels.float8.chosen_linears`); the arithmetic is written here
independently: forward operands in e4m3, output gradients in e5m2, one scale per tensor from its largest magnitude.
Tokens that travel to experts: e4m3, a power of two per 128 elements of a token; gradients pass unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.core.plan import Float8Choice
from weft.engine.kernels.float8 import chosen_linears
from weft.models.layout import describe
from weft.verify.plain_experts import by_position, plain_experts

WIRE_BLOCK = 128
LEAST_POWER = -126  # of normal float32 numbers


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


def round_inputs_of_experts(model: nn.Module) -> None:
    """Make every module of experts compute with tokens as they arrive in float8."""
    for module in plain_experts(model).values():
        module.register_forward_pre_hook(_with_rounded_tokens, with_kwargs=True)


def _with_rounded_tokens(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    (hidden, *routing), others = by_position(module, args, kwargs)
    return (_Arrived.apply(hidden), *routing), others  # type: ignore[no-untyped-call]


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        return arrived(tokens)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


def arrived(tokens: Tensor) -> Tensor:
    """The nearest float8 numbers, at the least power of two for each block that makes its largest number fit."""
    made = torch.zeros_like(tokens)
    for begin in range(0, tokens.shape[-1], WIRE_BLOCK):
        block = tokens[..., begin : begin + WIRE_BLOCK].float()
        largest = block.abs().amax(-1, keepdim=True).double()
        power = torch.ceil(torch.log2(largest / torch.finfo(torch.float8_e4m3fn).max))
        scale = torch.exp2(power.clamp(min=LEAST_POWER))
        values = (block.double() / scale).float().to(torch.float8_e4m3fn)
        made[..., begin : begin + WIRE_BLOCK] = (values.double() * scale).to(tokens.dtype)
    return made
