"""Matmuls in float8: chosen linear layers quantise their operands, in forward and backward (`float8_operands.py`).

With one scale per tensor codes serve both ways:

    y = x w^T      x, w in e4m3 (448 at most)         scale = 448 / largest magnitude, of this very tensor
    dx = g w       g in e5m2 (57344 at most), w as before
    dw = g^T x     g, x as before; all sums in float32, all results in the dtype of x

The recipe `delayed` takes the scales of steps before (`float8_delayed.py`). Other recipes quantise x, w and g for each
product, along its contraction. Weights, norms, routers, the head and the loss keep their precision. `core/float8.py`
chooses the layers that gain.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import DeviceError
from weft.core.float8 import takes_float8
from weft.core.float8_section import WHOLE as WHOLE_RECIPES
from weft.core.float8_section import Float8, Float8Choice
from weft.engine.activations.split_backward import LateGradient, SplitBackward
from weft.engine.kernels.float8_accuracy import Float8Layers
from weft.engine.kernels.float8_experts import apply_to_experts, names_of_experts
from weft.engine.kernels.float8_operands import (
    E4M3,
    E5M2,
    UNIT,
    WHOLE,
    Role,
    Sharing,
    codes_of,
    padded_codes,
    scale_of,
    whole_operand,
)
from weft.engine.kernels.float8_scaling import Scaling, scaling_of
from weft.engine.tp.context import TPContext
from weft.engine.wrap_forward import is_wrapped, replace_own
from weft.models.layout import ModelLayout

FIRST_CAPABILITY = (8, 9)


def apply_float8(
    model: nn.Module,
    layout: ModelLayout,
    float8: Float8,
    *,
    full: ModelLayout,
    tp: TPContext | None,
    device: torch.device,
) -> Float8Layers:
    """Every linear layer of the blocks by name, and whether it multiplies in float8 from now on; empty for "none".

    The sizes of a layer decide: where speed matters, micro-batches have more rows than layers have columns. `full`: the
    layout with the blocks of all stages.
    """
    chosen = chosen_linears(model, layout, float8.linears, tp=tp)
    names = [*(name for name, _ in _linears(model, full)), *names_of_experts(model, full)]
    layers = Float8Layers(float8, names, device=device)
    if any(chosen.values()):
        _require_float8(device)
    layers.update(chosen)
    for name, is_chosen in chosen.items():
        if is_chosen:
            _multiply_in_float8(model.get_submodule(name), name, float8, tp, layers)
    if float8.experts == "all":
        _require_float8(device)
        layers.update(apply_to_experts(model, layout, float8.recipe, tp, layers.accuracy_of))
    return layers


def _multiply_in_float8(linear: Any, name: str, float8: Float8, tp: TPContext | None, layers: Float8Layers) -> None:
    """The same parameters under the same names, with another forward."""
    linear.__class__ = Float8Linear
    scaling = scaling_of(f"{name}.weight", float8.recipe, tp)
    linear.scaling = replace(scaling, accuracy=layers.accuracy_of(name), delayed=layers.delayed_of(name))
    if is_wrapped(linear):
        replace_own(linear, lambda _: types.MethodType(Float8Linear.forward, linear))


def _require_float8(device: torch.device) -> None:
    """A GPU without float8 units would fail in the first matmul; a CPU multiplies the rounded values."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has no float8 matmuls",
            hint="they need Ada or Hopper (capability 8.9); set float8.linears = 'none'",
        )


def chosen_linears(
    model: nn.Module, layout: ModelLayout, choice: Float8Choice, *, tp: TPContext | None = None
) -> dict[str, bool]:
    """The choice of `apply_float8`, without applying it: by the sizes of whole layers, whatever a rank has of them."""
    if choice == "none":
        return {}
    shards = tp.shards if tp is not None else {}
    found = {}
    for name, linear in _linears(model, layout):
        shard = shards.get(f"{name}.weight")
        outputs, inputs = shard.shape if shard is not None else linear.weight.shape
        found[name] = takes_float8(inputs, outputs, choice)
    return found


class Float8Linear(nn.Linear):
    """A linear layer whose three matmuls are in float8."""

    scaling: Scaling = Scaling()
    # the weight and its scale, if it is gathered in float8: the parameter has no values then
    gathered: Tensor | None = None
    gathered_scale: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        out = self.product(input)
        return out if self.bias is None else out + self.bias

    def product(self, input: Tensor) -> Tensor:
        """The output without the bias."""
        if self.scaling.is_plain:
            return F.linear(input, self.weight)
        rows = input.reshape(-1, input.shape[-1])
        if self.scaling.delayed is not None:  # a compiled graph would not see the amax of this step
            out: Tensor = _outside_of_graphs(rows, self.weight, self.scaling.here())
            return out.view(*input.shape[:-1], -1)
        gathered = None
        if self.gathered is not None and self.gathered_scale is not None:
            gathered = self.gathered, self.gathered_scale
        made = scaled_product(rows, self.weight, self.scaling.here(), gathered)
        return made.view(*input.shape[:-1], -1)


def scaled_product(
    rows: Tensor, weight: Tensor, scaling: Scaling, gathered: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """rows @ weight^T. `gathered`: the weight's codes and their scale, if it has arrived as such."""
    values, deferred = _for_split(rows, weight)
    if scaling.recipe not in WHOLE_RECIPES:
        return _ScaledProduct.apply(rows, values, scaling, deferred)  # type: ignore[no-any-return, no-untyped-call]
    w, w_scale = gathered or _quantise(weight.detach(), "NK", "weight", scaling, rows=len(rows))
    return _Product.apply(rows, values, w, w_scale, scaling, deferred)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _outside_of_graphs(rows: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
    return scaled_product(rows, weight, scaling)


Owner = tuple[tuple[Tensor], list[LateGradient]]  # in a tuple: a tensor would be part of the graph


def _for_split(rows: Tensor, weight: Tensor) -> tuple[Tensor, Owner | None]:
    """The weight of a product, and where its gradient is deferred to; None: the backward computes it."""
    split = SplitBackward.active
    if split is None or not (rows.requires_grad and weight.requires_grad):
        return weight, None
    return weight.detach(), ((weight,), split.waiting)


def _gradient_of_weight(deferred: Owner | None, gradient: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    if deferred is None:
        return compute()
    (owner,), waiting = deferred
    waiting.append(LateGradient(owner, gradient, compute))
    return None


class _ScaledProduct(torch.autograd.Function):
    """Operands quantised along the contraction of each product, from unquantised rows, weight and gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, scaling: Scaling, deferred: Owner | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.scaling, ctx.deferred = scaling, deferred
        return scaling.multiply((rows, "MK", "activation"), (weight, "NK", "weight"), rows.dtype)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        gradient, scaling = arriving[0], ctx.scaling
        d_rows = scaling.multiply((gradient, "MN", "gradient"), (weight.t(), "KN", "weight"), gradient.dtype)

        # detached: else it would hold the graph, which holds the list of late gradients
        of_weight = functools.partial(_weight_product, scaling, gradient, rows.detach())
        return d_rows, _gradient_of_weight(ctx.deferred, gradient, of_weight), None, None


def _weight_product(scaling: Scaling, gradient: Tensor, rows: Tensor) -> Tensor:
    return scaling.multiply((gradient.t(), "NM", "gradient"), (rows.t(), "KM", "activation"), gradient.dtype)


class _Product(torch.autograd.Function):
    """The product of rows and a quantised weight, codes used both ways; the gradient goes to the unquantised weight."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, _: Tensor, w: Tensor, w_scale: Tensor, scaling: Scaling, deferred: Owner | None
    ) -> Tensor:
        x, x_scale = _quantise(rows, "MK", "activation", scaling)
        ctx.save_for_backward(x, x_scale, w, w_scale)
        ctx.scaling, ctx.deferred = scaling, deferred
        return _multiply(x, w.t(), x_scale, w_scale, rows.dtype, is_fast=True)

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        x, x_scale, w, w_scale = ctx.saved_tensors
        (gradient,) = arriving
        g, g_scale = _quantise(gradient, "MN", "gradient", ctx.scaling)
        d_rows = _multiply(g, _columns_first(w), g_scale, w_scale, gradient.dtype, is_fast=False)

        def of_weight(x: Tensor = x, x_scale: Tensor = x_scale) -> Tensor:
            return _multiply(g.t().contiguous(), _columns_first(x), g_scale, x_scale, gradient.dtype, is_fast=False)

        return d_rows, _gradient_of_weight(ctx.deferred, gradient, of_weight), None, None, None, None


def quantise(values: Tensor, dtype: torch.dtype, sharing: Sharing = WHOLE) -> tuple[Tensor, Tensor]:
    """`values` in `dtype`, and the factor that restores them; a tensor of zeros stays zero."""
    scale = scale_of(sharing.largest(values.abs().amax().float(), is_of_row=False), dtype)
    return codes_of(values, scale, dtype), scale.reciprocal()


def _quantise(values: Tensor, dims: str, role: Role, scaling: Scaling, *, rows: int = 1) -> tuple[Tensor, Tensor]:
    """An operand of a layer with one scale each. `rows`: rows that a weight multiplies."""
    if scaling.delayed is not None:
        codes, back = scaling.delayed.quantise(values, role, scaling.sharing(dims))
    else:
        codes, back = quantise(values, E5M2 if role == "gradient" else E4M3, scaling.sharing(dims))
    if scaling.accuracy is not None:
        scaling.compare(role, values, whole_operand(codes, back), rows=rows)
    return codes, back


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
    columns = right.shape[1]
    left, right = padded_codes(left, UNIT), padded_codes(right.t(), UNIT, row_multiple=UNIT).t()
    # private, no public form: tests/gpu/test_fast_path_gpu.py fails when it moves
    out: Tensor = torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=is_fast
    )
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def _linears(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, nn.Linear]]:
    for block in layout.blocks:
        for name, module in model.get_submodule(block).named_modules():
            if type(module) is nn.Linear:
                yield f"{block}.{name}", module
