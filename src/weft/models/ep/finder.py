"""Finds the experts of a Hugging Face model by structure, without a list of families.

transformers stores experts as parameters [experts, ...] of one module, whose forward takes hidden states, the experts
of each token and their weights. The order of the arguments is the same in every family, their names are not. Kernel,
gate, bias, transposition and norm are the module's own business.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn

from weft.models.ep.layout import ExpertLayer, ExpertLayout

_COUNT = re.compile(r"^(num|n)_\w*experts$")
_TOP_K = ("top_k", "num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token")
_INPUTS = 3  # hidden states, experts of each token, their weights


class _DeclinedError(Exception):
    """A module of experts that cannot be divided by experts; the message is the reason."""


def find_expert_layout(model: nn.Module) -> ExpertLayout:
    """The experts of `model`; empty for a dense model."""
    layers, declined = [], {}
    for name, module in _candidates(model):
        try:
            layers.append(_layer(model, name, module))
        except _DeclinedError as reason:
            declined[name] = str(reason)
    return ExpertLayout(layers=tuple(layers), declined=declined)


def _candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Outermost modules that hold the weights of experts; a list of modules is one candidate."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        is_named = "expert" in name.rpartition(".")[2] or "Experts" in type(module).__name__
        if is_named and (_stacked(module) or isinstance(module, nn.ModuleList | nn.ModuleDict) or _own_count(module)):
            inside.append(name)
            yield name, module


def _layer(model: nn.Module, name: str, module: nn.Module) -> ExpertLayer:
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise _DeclinedError("each of its experts is a module of its own")
    inputs = list(inspect.signature(type(module).forward).parameters)[1:]
    if len(inputs) < _INPUTS:
        raise _DeclinedError(f"its forward takes ({', '.join(inputs)}), not hidden states, experts and weights")
    stacked = _stacked(module)
    if not stacked:
        raise _DeclinedError("its parameters are not stacked as [experts, ...]")
    rows = {parameter.shape[0] for parameter in stacked.values()}
    if len(rows) > 1:
        raise _DeclinedError(f"its parameters have {' and '.join(map(str, sorted(rows)))} experts")
    num_experts = rows.pop()
    counts = _counts(module, num_experts)
    if not counts:
        raise _DeclinedError("it has no attribute with its number of experts, so it cannot be given fewer")
    of_experts = [
        key for key, value in module._parameters.items() if value is not None and value.shape[:1] == (num_experts,)
    ]
    return ExpertLayer(
        name=name,
        num_experts=num_experts,
        top_k=_top_k(model, name),
        parameters=tuple(f"{name}.{key}" for key in of_experts),
        shared=tuple(f"{name}.{key}" for key, _ in module.named_parameters() if key not in of_experts),
        counts=counts,
    )


def _stacked(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own three-dimensional parameters."""
    return {key: value for key, value in module._parameters.items() if value is not None and value.ndim == 3}


def _own_count(module: nn.Module) -> bool:
    return any(_COUNT.match(key) and isinstance(value, int) for key, value in vars(module).items())


def _counts(module: nn.Module, num_experts: int) -> tuple[str, ...]:
    return tuple(
        key for key, value in vars(module).items() if _COUNT.match(key) and type(value) is int and value == num_experts
    )


def _top_k(model: nn.Module, name: str) -> int | None:
    """Experts per token: an attribute of the module around the experts, of its router, or of the config."""
    parent = model.get_submodule(name.rpartition(".")[0])
    homes = [parent, *parent.children(), getattr(model, "config", None)]
    found = (getattr(home, key, None) for home in homes for key in _TOP_K)
    return next((value for value in found if type(value) is int and value > 0), None)
