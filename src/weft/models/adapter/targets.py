"""The linear layers that get an adapter: all of the blocks except routers, or those that patterns name.

A pattern is a glob of the full module name, or of its end ("q_proj"), as PEFT's target_modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from weft.core.errors import AdapterError
from weft.models.layout import find_blocks
from weft.models.tp.roles import linear_facts

_ROUTERS = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.|$)")


@dataclass(frozen=True, kw_only=True)
class LinearTarget:
    """A linear module and its sizes."""

    name: str
    module: nn.Module
    inputs: int
    outputs: int


def find_targets(model: nn.Module, patterns: Sequence[str]) -> list[LinearTarget]:
    """The linears of the blocks that match a pattern; without patterns all except routers."""
    linears = list(_linears_of_blocks(model))
    if not linears:
        raise AdapterError(
            f"{type(model).__name__} has no linear layers in repeated blocks", hint="train it without [adapter]"
        )
    if not patterns:
        return [linear for linear in linears if not is_router(linear.name)]
    for pattern in patterns:
        if not any(_matches(linear.name, pattern) for linear in linears):
            raise AdapterError(f"adapter.targets: {_why_none(model, pattern)}", hint=_names_hint(linears))
    return [linear for linear in linears if any(_matches(linear.name, pattern) for pattern in patterns)]


def is_router(name: str) -> bool:
    """Whether a module or a parameter is of a router, by its name."""
    return _ROUTERS.search(name) is not None


def matching_patterns(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Those of `patterns` that match a linear of the blocks."""
    linears = list(_linears_of_blocks(model))
    return [pattern for pattern in patterns if any(_matches(linear.name, pattern) for linear in linears)]


def matching_parameters(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Those of `patterns` that match a parameter."""
    names = [name for name, _ in model.named_parameters()]
    return [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]


def notes_on_experts(model: nn.Module) -> list[str]:
    """Parameters of experts, which are no linear layers and get no adapter."""
    blocks = tuple(f"{block}." for block in find_blocks(model))
    left_out = sorted(
        {
            re.sub(r"\.\d+(?=\.)", ".*", name)
            for name, parameter in model.named_parameters()
            if name.startswith(blocks) and parameter.ndim >= 3 and ".experts." in name
        }
    )
    return [f"no adapters beside {', '.join(left_out)}: matrices of experts stay frozen"] if left_out else []


def _linears_of_blocks(model: nn.Module) -> Iterator[LinearTarget]:
    blocks = tuple(f"{block}." for block in find_blocks(model))
    for name, module in model.named_modules():
        facts = linear_facts(name, module) if name.startswith(blocks) else None
        if facts is not None:
            yield LinearTarget(name=name, module=module, inputs=facts.inputs, outputs=facts.outputs)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _why_none(model: nn.Module, pattern: str) -> str:
    other = next((module for name, module in model.named_modules() if name and _matches(name, pattern)), None)
    if other is None:
        return f"no layer matches {pattern!r}"
    return f"{pattern!r} matches a {type(other).__name__}, and adapters are for linear layers of the blocks"


def _names_hint(linears: Sequence[LinearTarget]) -> str:
    names = dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears)
    return f"the blocks have {', '.join(names)}"
