"""Products of experts in float8: for each expert the three products of its group of rows, by the recipe of the layers.

Modules are those with transformers' grouped products; around them rows are sorted by expert, unless a dispatcher has
done so. An expert's operands are matrices of their own: a scale never spans two experts. One kernel runs per expert,
so a GPU waits for the numbers of rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.float8 import takes_float8
from weft.core.float8_section import Float8Recipe
from weft.core.precision import E2M1, E4M3
from weft.engine.ep.grouped import grouped_forward
from weft.engine.kernels.float8_accuracy import LayerAccuracy
from weft.engine.kernels.float8_scaling import Scaling, scaling_of
from weft.engine.measure.seen import seen
from weft.engine.router.counted import count_choices
from weft.engine.tp.context import TPContext
from weft.engine.wrap_forward import Forward, wrap_own_forward
from weft.models.layout import ModelLayout

_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def apply_to_experts(
    model: nn.Module,
    layout: ModelLayout,
    recipe: Float8Recipe,
    tp: TPContext | None,
    accuracy_of: Callable[[str], LayerAccuracy | None] = lambda _: None,
) -> dict[str, bool]:
    """Matrices of experts by name, and whether they multiply in float8 from now on."""
    found: dict[str, bool] = {}
    for name, module in _modules_with_groups(model, layout):
        found |= _apply(name, module, recipe, tp, accuracy_of)
    return found


def names_of_experts(model: nn.Module, layout: ModelLayout) -> list[str]:
    """All matrices of experts, those without values on this rank too."""
    modules = _modules_with_groups(model, layout)
    return [f"{name}.{key}" for name, module in modules for key in _MATRICES if key in module._parameters]


def _modules_with_groups(model: nn.Module, layout: ModelLayout) -> Iterator[tuple[str, nn.Module]]:
    for block in layout.blocks:
        for inner, module in model.get_submodule(block).named_modules():
            if has_groups(module):
                yield f"{block}.{inner}", module


def has_groups(module: nn.Module) -> bool:
    """Whether grouped products can be those of this module."""
    names = ("has_gate", "has_bias", "is_transposed", "num_experts", "_apply_gate", "act_fn")
    return "down_proj" in module._parameters and all(hasattr(module, name) for name in names)


def _apply(
    name: str,
    module: Any,
    recipe: Float8Recipe,
    tp: TPContext | None,
    accuracy_of: Callable[[str], LayerAccuracy | None],
) -> dict[str, bool]:
    dims, shards = "KN" if module.is_transposed else "NK", tp.shards if tp is not None else {}
    scalings: dict[str, Scaling] = {}
    found = {}
    for key in _MATRICES:
        if module._parameters.get(key) is None:
            continue
        parameter = f"{name}.{key}"
        shape = shards[parameter].shape if parameter in shards else getattr(module, key).shape
        found[parameter] = takes_float8(shape[-1], shape[-2], "all")
        if found[parameter]:
            scalings[key] = replace(scaling_of(parameter, recipe, tp, dims=dims), accuracy=accuracy_of(parameter))
    if all(found.values()):
        module.own_product = ExpertProducts(scalings, is_transposed=module.is_transposed)
        wrap_own_forward(module, _SortedExperts(module))
        return found
    return dict.fromkeys(found, False)


class ExpertProducts:
    """The products of a module's groups, by the name of the matrix."""

    def __init__(self, scalings: dict[str, Scaling], *, is_transposed: bool) -> None:
        self.scalings, self.is_transposed = scalings, is_transposed

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows are read
    def __call__(self, name: str, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        scaling = self.scalings[name]
        seen("experts", E2M1 if scaling.recipe == "nvfp4" else E4M3)
        matrices = weight.transpose(1, 2) if self.is_transposed else weight
        bounds = read_ends(ends, len(rows))
        return _ExpertProduct.apply(rows, matrices, bounds, scaling)  # type: ignore[no-any-return, no-untyped-call]


def read_ends(ends: Tensor, num_rows: int) -> list[int]:
    """The ends of the groups; a dry run has no values and takes even groups of `num_rows`."""
    return [int(end) for end in ends.tolist()]


class _SortedExperts:
    """The innermost layer of a module's forward: its tokens in the order of experts, and back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def __call__(self, _forward: Forward, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, index, weights = (given[name] for name in self._names[:3])
        count_choices(self._module, index)
        tokens = hidden if hidden.ndim == 2 else hidden.flatten(0, -2)
        numbers, order = index.flatten().sort(stable=True)
        made = grouped_forward(self._module, tokens[order // index.shape[1]], numbers, _no_linear)
        made = made * weights.flatten()[order].unsqueeze(1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        summed = made[back].view(len(tokens), index.shape[1], -1).sum(1).to(hidden.dtype)
        shaped: Tensor = summed.view(hidden.shape)
        return shaped


def _no_linear(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("all matrices of these experts have products of their own")


class _ExpertProduct(torch.autograd.Function):
    """`matrices` [experts, N, K]; `bounds`: the end of every expert's rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor, bounds: list[int], scaling: Scaling) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.bounds, ctx.scaling = bounds, scaling
        made = rows.new_zeros(len(rows), matrices.shape[1])
        for expert, group in _groups(bounds):
            left, right = (rows[group], "MK", "activation"), (matrices[expert], "NK", "weight")
            made[group] = scaling.multiply(left, right, rows.dtype)  # type: ignore[arg-type]
        return made

    @staticmethod
    def backward(ctx: Any, *arriving: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, matrices = ctx.saved_tensors
        (gradient,), scaling = arriving, ctx.scaling
        d_rows, d_matrices = torch.zeros_like(rows), torch.zeros_like(matrices)
        for expert, group in _groups(ctx.bounds):
            g, x, w = gradient[group], rows[group], matrices[expert]
            d_rows[group] = scaling.multiply((g, "MN", "gradient"), (w.t(), "KN", "weight"), rows.dtype)
            d_matrices[expert] = scaling.multiply((g.t(), "NM", "gradient"), (x.t(), "KM", "activation"), rows.dtype)
        return d_rows, d_matrices, None, None


def _groups(bounds: list[int]) -> list[tuple[int, slice]]:
    """Experts with rows, and their rows."""
    begins = [0, *bounds[:-1]]
    return [(at, slice(begin, end)) for at, (begin, end) in enumerate(zip(begins, bounds, strict=True)) if end > begin]
