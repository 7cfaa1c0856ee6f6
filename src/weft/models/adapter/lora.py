"""Low-rank adapters inside a model: every target linear also computes scale * B(A(dropout(x))).

    base  y = W x + b            frozen
    lora  y = W x + b + scale * B A x        A: [rank, inputs], B: [outputs, rank], both trained

A target keeps its name, class name and parameters; the factors are its children `lora_A` and `lora_B`. So parallel
layouts, checkpoints and PEFT's files know them by name, and model code is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from weft.core.adapter_spec import AdapterSpec
from weft.core.errors import AdapterError
from weft.models.adapter.quantised import mark_quantised
from weft.models.adapter.targets import LinearTarget, find_targets

FACTOR_A, FACTOR_B = "lora_A", "lora_B"


class LoraFactor(nn.Module):
    """One factor of an adapter, under PEFT's name. Its linear reads the weight; it has no forward."""

    def __init__(self, rows: int, columns: int, *, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device))


class Adapted:
    """Mixed into the class of a target linear."""

    lora_A: LoraFactor  # noqa: N815 - PEFT's name
    lora_B: LoraFactor  # noqa: N815
    adapter_scale: float
    adapter_dropout: float  # the engine seeds dropout of models with such an attribute above 0
    training: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = super().forward(x)  # type: ignore[misc]
        return base + self.adapter_delta(x)

    def adapter_delta(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapter adds to the output; tensor parallelism sums it with the base's partial product."""
        if self.adapter_dropout > 0:
            x = F.dropout(x, self.adapter_dropout, self.training)
        return F.linear(F.linear(x, self.lora_A.weight), self.lora_B.weight) * self.adapter_scale


def insert_adapter(model: nn.Module, spec: AdapterSpec) -> None:
    """Add the adapters of `spec` to `model`, and freeze all but them and `train_also`. Values come from a source."""
    if not spec.is_on:
        return
    trained = _matching(model, spec.train_also)
    targets = find_targets(model, spec.targets)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained and parameter.requires_grad)
    mark_quantised(model, spec)
    for target in targets:
        _adapt(target, spec)
    model.weft_frozen_rests_low = spec.base != "model"  # type: ignore[assignment]


def _adapt(target: LinearTarget, spec: AdapterSpec) -> None:
    module: Any = target.module
    device = module.weight.device
    module.__class__ = _adapted_class(module.__class__)
    module.lora_A = LoraFactor(spec.rank, target.inputs, device=device)
    module.lora_B = LoraFactor(target.outputs, spec.rank, device=device)
    module.adapter_scale, module.adapter_dropout = spec.scale, spec.dropout


@functools.cache
def _adapted_class(kind: Any) -> type[nn.Module]:
    """A subclass of the same name: what reads linears by class name (tensor parallelism) still knows it."""
    made: type[nn.Module] = type(kind.__name__, (Adapted, kind), {"__module__": kind.__module__})
    return made


def _matching(model: nn.Module, patterns: list[str]) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched:
            raise AdapterError(
                f"adapter.train_also: no parameter matches {pattern!r}",
                hint=f"names look like {names[-1]!r}; * matches anything",
            )
        found |= matched
    return found


def adapted_linears(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """(name, module) of every linear with an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted):
            yield name, module


def factor_names(model: nn.Module) -> list[str]:
    """The names of all factors, in the order of the model."""
    return [f"{name}.{key}.weight" for name, _ in adapted_linears(model) for key in (FACTOR_A, FACTOR_B)]


def leave_base_out(model: nn.Module) -> None:
    """Checkpoints of `model` refer to its frozen weights, which files have, and do not hold them."""
    model.weft_base_elsewhere = True  # type: ignore[assignment]


def rests_low(model: nn.Module) -> bool:
    """Whether frozen weights rest in the compute dtype, or in codes, rather than as trained ones do."""
    return bool(getattr(model, "weft_frozen_rests_low", False))


def names_elsewhere(model: nn.Module) -> frozenset[str]:
    """Frozen parameters that checkpoints leave out."""
    if not getattr(model, "weft_base_elsewhere", False):
        return frozenset()
    return frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)
