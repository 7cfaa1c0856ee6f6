"""Shared experts that a block calls after its experts: they can be computed while tokens travel to the others."""

from __future__ import annotations

import inspect
import re

from torch import nn


def shared_after(model: nn.Module, experts_name: str) -> nn.Module | None:
    """The shared experts beside a module of experts; None if there are none, or if the block calls them first."""
    parent_name, _, key = experts_name.rpartition(".")
    parent = model.get_submodule(parent_name)
    try:
        source = inspect.getsource(type(parent).forward)
    except (OSError, TypeError):  # a class of an interactive session has none
        return None
    calls = re.findall(r"self\.(\w+)\(", source)
    if key not in calls:
        return None
    earlier, later = calls[: calls.index(key)], calls[calls.index(key) + 1 :]
    names = dict.fromkeys(name for name in later if "shared" in name and name not in earlier)
    found = [getattr(parent, name, None) for name in names]
    modules = [module for module in found if isinstance(module, nn.Module) and _computes_rows_alone(module)]
    return modules[0] if len(modules) == 1 else None


def _computes_rows_alone(module: nn.Module) -> bool:
    """Whether it is made of linear layers and functions of single elements: the shape of its rows does not matter."""
    leaves = [part for part in module.modules() if next(part.children(), None) is None and part is not module]
    has_weights = any(isinstance(part, nn.Linear) for part in leaves)
    return has_weights and all(
        isinstance(part, nn.Linear) or (next(part.parameters(), None) is None and not isinstance(part, nn.Dropout))
        for part in leaves
    )
