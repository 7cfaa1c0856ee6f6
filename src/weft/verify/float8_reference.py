"""Float8 of the reference: values rounded to float8 and back, then multiplied in float32. No float8 kernel.

Matmuls: the engine chooses the layers (`engine.kernels.float8.chosen_linears`); the arithmetic of every recipe is
written here independently.
Tokens that travel to experts: e4m3, a power of two per 128 elements of a token; gradients pass unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.float8_section import WHOLE, Float8Choice, Float8Recipe
from weft.engine.kernels.float8 import chosen_linears
from weft.models.layout import describe
from weft.verify.float8_delayed import delayed_of
from weft.verify.plain_experts import by_position, plain_experts

Note = Callable[..., None] | None
WIRE_BLOCK = 128
LEAST_POWER = -126  # of normal float32 numbers


class Fallback:
    """Layers whose error in a measured step is larger than `limit` compute unquantised from the next step on."""

    def __init__(self, every: int, limit: float) -> None:
        self._every, self._limit, self._step = every, limit, 0
        self._sums: dict[tuple[str, str], list[float]] = {}  # by layer and operand: relative errors, their number
        self.plain: set[str] = set()

    def begin(self, step: int) -> None:
        """Before a forward of step `step`, from 0 on."""
        if step != self._step:
            self.finish()
            self._step = step

    def finish(self) -> None:
        if self._every and (self._step + 1) % self._every == 0:
            self.plain |= {name for (name, _), (error, count) in self._sums.items() if error > self._limit * count}
        self._sums.clear()

    def add(self, name: str, operand: str, values: Tensor, made: Tensor, *, times: int = 1) -> None:
        sums = self._sums.setdefault((name, operand), [0.0, 0.0])
        wide = values.double()
        some = wide != 0
        sums[0] += times * float(((made.double() - wide)[some] / wide[some]).abs().sum())
        sums[1] += times * int(some.sum())


NO_FALLBACK = Fallback(0, 0.0)


def fallback_of(model: nn.Module) -> Fallback:
    found = getattr(model, "float8_fallback", None)
    return found if isinstance(found, Fallback) else NO_FALLBACK


def multiply_in_float8(
    model: nn.Module, choice: Float8Choice, recipe: Float8Recipe, fallback: Fallback = NO_FALLBACK
) -> None:
    """Make the chosen linear layers of `model`'s blocks multiply in float8."""
    for name, is_chosen in chosen_linears(model, describe(model), choice).items():
        if is_chosen:
            linear, again = (
                model.get_submodule(name),
                functools.partial(_recompute, recipe, fallback=fallback, name=name),
            )
            delayed = functools.partial(delayed_of(model).rounded, name) if recipe == "delayed" else None
            linear.register_forward_hook(functools.partial(again, delayed=delayed))


def _recompute(
    recipe: Float8Recipe,
    linear: nn.Module,
    args: tuple[Tensor, ...],
    plain: Tensor,
    *,
    fallback: Fallback = NO_FALLBACK,
    name: str = "",
    delayed: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Forward hook: replace the layer's output."""
    if name in fallback.plain:
        return plain
    rows, noted = args[0].flatten(0, -2), fallback if linear.training else None
    at_scale = functools.partial(delayed, is_noted=linear.training) if delayed is not None else None
    out = _rounded_product(rows, linear.weight, recipe, noted, name, at_scale)
    out = out.view(plain.shape)
    return out if linear.bias is None else out + linear.bias  # type: ignore[operator]


def _rounded_product(
    inputs: Tensor,
    weight: Any,
    recipe: Float8Recipe,
    fallback: Fallback | None,
    name: str,
    at_scale: Callable[..., Tensor] | None = None,
) -> Tensor:
    """`fallback`: sums the errors of a step that is measured; `at_scale` rounds with scales of steps before."""
    is_summed = fallback is not None and fallback is not NO_FALLBACK
    note = functools.partial(fallback.add, name) if fallback is not None and is_summed else None
    # with one scale per operand its codes serve all products
    made: Tensor = _Rounded.apply(inputs, weight, at_scale or _by_recipe(recipe), note, recipe in WHOLE)  # type: ignore[no-untyped-call]
    return made


def _by_recipe(recipe: Float8Recipe) -> Callable[[str, Tensor], Tensor]:
    return lambda operand, values: rounded(
        values, recipe, is_weight=operand == "weight", is_gradient=operand == "gradient"
    )


class _Rounded(torch.autograd.Function):
    """Every operand is rounded for its product, along the dimension that the product sums over."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, rounding: Callable[..., Tensor], note: Note, is_whole: bool
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.rounding, ctx.note, ctx.is_whole = rounding, note, is_whole
        x, w = rounding("input", inputs), rounding("weight", weight)
        if note is not None:
            note("input", inputs, x)
            note("weight", weight, w, times=len(inputs))
        return torch.einsum("mk,nk->mn", x, w).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        inputs, weight = ctx.saved_tensors
        (gradient,), rounding = arriving, ctx.rounding
        g, w = rounding("gradient", gradient), rounding("weight", weight.t())
        late, x = rounding("gradient", gradient.t()), rounding("input", inputs.t())
        if ctx.note is not None:
            ctx.note("gradient", gradient, g)
        if ctx.note is not None and not ctx.is_whole:  # else codes serve all products
            ctx.note("weight", weight.t(), w, times=len(inputs))
            ctx.note("gradient", gradient.t(), late)
            ctx.note("input", inputs.t(), x)
        by_input, by_weight = torch.einsum("mn,kn->mk", g, w), torch.einsum("nm,km->nk", late, x)
        return by_input.to(inputs.dtype), by_weight.to(inputs.dtype), None, None, None


def rounded(values: Tensor, recipe: Float8Recipe, *, is_weight: bool = False, is_gradient: bool = False) -> Tensor:
    """The nearest numbers that the recipe can write, as float32; the last dimension is summed over."""
    rows, columns = values.shape
    if recipe in ("tensorwise", "delayed"):  # which has no scale before a first step
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


def multiply_experts_in_float8(model: nn.Module, recipe: Float8Recipe, fallback: Fallback = NO_FALLBACK) -> None:
    """Make modules of experts compute expert by expert, with every product rounded, if all sizes divide by 16."""
    for name, module in plain_experts(model).items():
        matrices = [value for key, value in module._parameters.items() if value is not None and value.ndim == 3]
        known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))
        if known and all(size % 16 == 0 for matrix in matrices for size in matrix.shape[1:]):
            again = functools.partial(_experts_again, recipe, fallback, name)
            module.register_forward_hook(again, with_kwargs=True)


def _experts_again(
    recipe: Float8Recipe, fallback: Fallback, name: str, module: Any, args: Any, kwargs: Any, plain: Tensor
) -> Tensor:
    """Forward hook: replace the module's output."""
    (hidden, index, weights), _ = by_position(module, args, kwargs)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    first = "gate_up_proj" if module.has_gate else "up_proj"
    slots = [torch.zeros_like(tokens) for _ in range(index.shape[1])]
    for expert in sorted(set(index.flatten().tolist())):
        token, slot = torch.nonzero(index == expert, as_tuple=True)
        made = _of_expert(module, first, expert, tokens[token], recipe, fallback, f"{name}.{first}")
        made = module._apply_gate(made) if module.has_gate else module.act_fn(made)
        made = _of_expert(module, "down_proj", expert, made, recipe, fallback, f"{name}.down_proj")
        if getattr(module, "has_post_expert_norm", False):
            made = module.post_expert_norm(made)
        made = made * weights[token, slot, None]
        for at in range(index.shape[1]):
            slots[at] = slots[at].to(made.dtype).index_add(0, token[slot == at], made[slot == at])
    return torch.stack(slots, 1).sum(1).to(plain.dtype).view(plain.shape)


def _of_expert(
    module: Any, name: str, expert: int, rows: Tensor, recipe: Float8Recipe, fallback: Fallback, layer: str
) -> Tensor:
    matrix = getattr(module, name)[expert]
    matrix = matrix.t() if module.is_transposed else matrix
    made: Tensor = rows @ matrix.t()
    if layer not in fallback.plain:
        made = _rounded_product(rows, matrix, recipe, fallback if module.training else None, layer)
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
