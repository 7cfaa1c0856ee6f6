"""Float8 of the reference: values rounded to float8 and back, then multiplied in float32. No float8 kernel.

Matmuls: the engine chooses the layers (`engine.kernels.float8.chosen_linears`); the arithmetic of every recipe is
written here independently.
Tokens that travel to experts: e4m3, a power of two per 128 elements of a token; gradients pass unchanged.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.float8_section import Float8Choice, Float8Recipe
from weft.engine.kernels.float8 import chosen_linears
from weft.models.layout import describe
from weft.verify.plain_experts import by_position, plain_experts

WIRE_BLOCK = 128
LEAST_POWER = -126  # of normal float32 numbers


def multiply_in_float8(model: nn.Module, choice: Float8Choice, recipe: Float8Recipe) -> None:
    """Make the chosen linear layers of `model`'s blocks multiply in float8."""
    for name, is_chosen in chosen_linears(model, describe(model), choice).items():
        if is_chosen:
            linear = model.get_submodule(name)
            linear.register_forward_hook(functools.partial(_recompute, recipe))


def _recompute(recipe: Float8Recipe, linear: nn.Module, args: tuple[Tensor, ...], plain: Tensor) -> Tensor:
    """Forward hook: replace the layer's output."""
    out: Tensor = _Rounded.apply(args[0].flatten(0, -2), linear.weight, recipe)  # type: ignore[no-untyped-call]
    out = out.view(plain.shape)
    return out if linear.bias is None else out + linear.bias  # type: ignore[operator]


class _Rounded(torch.autograd.Function):
    """Every operand is rounded for its product, along the dimension that the product sums over."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.recipe = recipe
        x, w = rounded(inputs, recipe), rounded(weight, recipe, is_weight=True)
        return torch.einsum("mk,nk->mn", x, w).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight = ctx.saved_tensors
        (gradient,) = arriving
        g = rounded(gradient, ctx.recipe, is_gradient=True)
        by_input = torch.einsum("mn,kn->mk", g, rounded(weight.t(), ctx.recipe, is_weight=True))
        g = rounded(gradient.t(), ctx.recipe, is_gradient=True)
        by_weight = torch.einsum("nm,km->nk", g, rounded(inputs.t(), ctx.recipe))
        return by_input.to(inputs.dtype), by_weight.to(inputs.dtype), None


def rounded(values: Tensor, recipe: Float8Recipe, *, is_weight: bool = False, is_gradient: bool = False) -> Tensor:
    """The nearest numbers that the recipe can write, as float32; the last dimension is summed over."""
    rows, columns = values.shape
    if recipe == "tensorwise":
        dtype = torch.float8_e5m2 if is_gradient else torch.float8_e4m3fn
        return _nearest(values, values.abs().max(), dtype)
    if recipe == "nvfp4":
        return _nearest_e2m1(values)
    width = {"rowwise": columns, "mxfp8": 32}.get(recipe, 128)
    height = 128 if recipe == "blockwise" and is_weight else 1
    made = torch.empty(rows, columns, dtype=torch.float32, device=values.device)
    for left in range(0, columns, width):
        strip = values[:, left : left + width]
        largest = strip.abs().amax(-1)
        for top in range(0, rows, height) if height > 1 else ():
            largest[top : top + height] = largest[top : top + height].max()
        if recipe == "mxfp8":
            made[:, left : left + width] = _nearest_at_power(strip, largest[:, None])
            continue
        made[:, left : left + width] = _nearest(strip, largest[:, None], torch.float8_e4m3fn)
    return made


def _nearest_at_power(values: Tensor, largest: Tensor) -> Tensor:
    """At the least power of two with which the largest number fits."""
    power = torch.ceil(torch.log2(largest.double() / 448)).clamp(-127, 127)
    scale = torch.exp2(power)
    return ((values.double() / scale).float().to(torch.float8_e4m3fn).double() * scale).float()


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _nearest_e2m1(values: Tensor) -> Tensor:
    """16 numbers of a row share a scale in e4m3, which counts in units of one float32 of the tensor."""
    unit = values.abs().max().float() / (6 * 448)
    made = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
    if unit == 0:
        return made
    table = _E2M1.to(values.device)
    middles = (table[1:] + table[:-1]) / 2
    for left in range(0, values.shape[1], 16):
        block = values[:, left : left + 16].float()
        scale = (block.abs().amax(1, keepdim=True) / 6 / unit).to(torch.float8_e4m3fn).float()
        size = torch.where(scale > 0, block.abs() * ((1 / unit) / scale), 0.0).clamp(max=6.0)
        place = torch.searchsorted(middles, size.contiguous())  # of the lower neighbour, in the middle of two
        is_tie = size == middles[place.clamp(max=6)]
        place = place + (is_tie & (place % 2 == 1))  # even places have an even last bit
        made[:, left : left + 16] = table[place] * block.sign() * scale * unit
    return made


def _nearest(values: Tensor, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Where `largest` is 0 all values are."""
    scale = torch.finfo(dtype).max / torch.where(largest == 0, 1.0, largest.float())
    return (values.float() * scale).to(dtype).float() / scale


def multiply_experts_in_float8(model: nn.Module, recipe: Float8Recipe) -> None:
    """Make modules of experts compute expert by expert, with every product rounded, if all sizes divide by 16."""
    for module in plain_experts(model).values():
        matrices = [value for key, value in module._parameters.items() if value is not None and value.ndim == 3]
        known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
        if known and all(size % 16 == 0 for matrix in matrices for size in matrix.shape[1:]):
            module.register_forward_hook(functools.partial(_experts_again, recipe), with_kwargs=True)


def _experts_again(recipe: Float8Recipe, module: Any, args: Any, kwargs: Any, plain: Tensor) -> Tensor:
    """Forward hook: replace the module's output."""
    (hidden, index, weights), _ = by_position(module, args, kwargs)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    first = "gate_up_proj" if module.has_gate else "up_proj"
    slots = [torch.zeros_like(tokens) for _ in range(index.shape[1])]
    for expert in sorted(set(index.flatten().tolist())):
        token, slot = torch.nonzero(index == expert, as_tuple=True)
        made = _of_expert(module, first, expert, tokens[token], recipe)
        made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
        made = _of_expert(module, "down_proj", expert, made, recipe)
        if getattr(module, "has_post_expert_norm", False):
            made = module.post_expert_norm(made)
        made = made * weights[token, slot, None]
        for at in range(index.shape[1]):
            slots[at] = slots[at].to(made.dtype).index_add(0, token[slot == at], made[slot == at])
    return torch.stack(slots, 1).sum(1).to(plain.dtype).view(plain.shape)


def _of_expert(module: Any, name: str, expert: int, rows: Tensor, recipe: Float8Recipe) -> Tensor:
    matrix = getattr(module, name)[expert]
    made: Tensor = _Rounded.apply(rows, matrix.t() if module.is_transposed else matrix, recipe)  # type: ignore[no-untyped-call]
    return made + getattr(module, f"{name}_bias")[expert] if module.has_bias else made


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
