"""Roles of a block's modules in tensor parallelism: linears and their shapes, norms, names.

Not the regions (`attention`, `mlp`, `experts` build those). Names decide the role of a linear; shapes must agree, or
the region is declined. `names_used` reads the bytecode of a class's methods, not their source.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from weft.models.tp.layout import LinearShards, Segment, Segments

# subclasses of nn.Linear with the forward of a linear; others are unknown
_PLAIN_LINEARS = ("Linear", "FalconLinear")

_NORM = re.compile(r"norm(1p|gated|perhead)?$", re.IGNORECASE)  # not RobertaPreLayerNormModel

ATTENTION_ROLES: dict[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "Wq", "q_lin", "query_proj"),
    "k": ("k_proj", "key", "Wk", "k_lin", "key_proj"),
    "v": ("v_proj", "value", "Wv", "v_lin", "value_proj"),
    "qkv": ("qkv_proj", "c_attn", "query_key_value", "Wqkv"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "Wo", "out_lin"),
    "gate": ("gate_proj", "g_proj"),
}
MLP_ROLES: tuple[tuple[tuple[str, ...], str], ...] = (  # columns, row
    (("gate_proj", "up_proj"), "down_proj"),
    (("w1", "w3"), "w2"),
    (("proj_up_gate", "proj_up"), "proj_down"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("Wi",), "Wo"),
    (("lin1",), "lin2"),
    (("input_linear",), "output_linear"),
    (("0",), "2"),
)


class DeclinedError(Exception):
    """Raised for a module that looks like a region and holds something unknown; it stays replicated.

    `at`: the replicated modules, if not the candidate itself.
    """

    def __init__(self, reason: str, *, at: tuple[str, ...] = ()) -> None:
        super().__init__(reason)
        self.at = at


@dataclass(frozen=True, kw_only=True)
class Site:
    """A candidate module, with facts of its model."""

    name: str
    module: nn.Module
    hidden_size: int
    model_type: str
    config: Any = None

    def child(self, path: str) -> str:
        return f"{self.name}.{path}" if self.name else path


@dataclass(frozen=True, kw_only=True)
class LinearFacts:
    """A linear module's name, sizes and storage."""

    name: str
    inputs: int
    outputs: int
    is_transposed: bool


def linear_facts(name: str, module: nn.Module) -> LinearFacts | None:
    """Facts of an nn.Linear or GPT-2's Conv1D; None for other modules."""
    if isinstance(module, nn.Linear) and type(module).__name__ in _PLAIN_LINEARS:
        outputs, inputs = module.weight.shape
        return LinearFacts(name=name, inputs=inputs, outputs=outputs, is_transposed=False)
    if type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter):
        inputs, outputs = module.weight.shape  # type: ignore[misc]
        return LinearFacts(name=name, inputs=inputs, outputs=outputs, is_transposed=True)
    return None


def child_linear(site: Site, names: tuple[str, ...]) -> LinearFacts | None:
    """The first child of those names that is a linear, or wraps only one."""
    for name in names:
        child = site.module._modules.get(name)
        if child is None:
            continue
        facts = linear_facts(site.child(name), child)
        inner = child._modules.get("linear")
        if facts is None and inner is not None and len(child._modules) == 1 and not child._parameters:
            facts = linear_facts(site.child(f"{name}.linear"), inner)
        if facts is not None:
            return facts
    return None


def looks_like_norm(module: nn.Module) -> bool:
    """Whether a class is named as a norm: norms work per token."""
    return _NORM.search(type(module).__name__) is not None


def is_norm(module: nn.Module) -> bool:
    """Whether it is a norm with at most a weight and a bias, and no children."""
    return looks_like_norm(module) and not module._modules and set(module._parameters) <= {"weight", "bias"}


def column_shard(facts: LinearFacts, outputs: Segments) -> LinearShards:
    return LinearShards(
        name=facts.name,
        side="column",
        outputs=outputs,
        inputs=replicated(facts.inputs),
        is_transposed=facts.is_transposed,
    )


def row_shard(facts: LinearFacts, inputs: Segments) -> LinearShards:
    return LinearShards(
        name=facts.name, side="row", outputs=replicated(facts.outputs), inputs=inputs, is_transposed=facts.is_transposed
    )


def replicated(features: int) -> Segments:
    """Features that one-dimensional tensor parallelism replicates and a grid may divide anywhere."""
    return (Segment(units=features),)


def is_residual_norm(module: nn.Module, hidden_size: int) -> bool:
    """Whether a norm is over the hidden size, or has no parameters that show its size."""
    return all(tuple(parameter.shape) == (hidden_size,) for parameter in module.parameters())


def parameters_beside(site: Site, linears: tuple[LinearFacts, ...]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """(full name, owner, parameter) of all parameters in the module outside `linears`."""
    taken = {facts.name for facts in linears}
    for owner_path, owner in site.module.named_modules():
        owner_name = site.child(owner_path) if owner_path else site.name
        if owner_name in taken:
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if not is_factor(owner_name):  # of an adapter: sharded with its linear
                yield f"{owner_name}.{key}", owner, parameter


def is_factor(module_name: str) -> bool:
    """Whether the module is a factor of a low-rank adapter, by its name."""
    return module_name.endswith((".lora_A", ".lora_B"))


def names_used(module: nn.Module) -> frozenset[str]:
    """Attribute and global names in the methods of a module's class, without constructors."""
    return _names_of_classes(type(module).__mro__)


@functools.cache
def _names_of_classes(classes: tuple[type, ...]) -> frozenset[str]:
    found: set[str] = set()
    for one in classes:
        if one is nn.Module:
            break
        for key, value in vars(one).items():
            function = inspect.unwrap(value) if callable(value) else None
            code = getattr(function, "__code__", None)
            if code is not None and key != "__init__":
                found |= _names_of(code)
    return frozenset(found)


def _names_of(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of(constant)
    return names


def takes(module: nn.Module, argument: str) -> bool:
    """Whether the module's forward has an argument of that name."""
    return argument in inspect.signature(inspect.unwrap(type(module).forward)).parameters


def entries_of(site: Site, columns: tuple[LinearFacts, ...]) -> tuple[str, ...]:
    """Modules where the hidden states enter: the module, or its column linears if it also adds the residual.

    Otherwise the residual's full gradient would be summed over the ranks.
    """
    if takes(site.module, "residual"):
        return tuple(facts.name for facts in columns)
    return (site.name,)
