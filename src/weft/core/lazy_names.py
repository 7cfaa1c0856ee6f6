"""Lazy imports of a package's public names, so that importing the package costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for `package`. `homes`: name -> its module, "module:other" for another name there, or "module:"
    for the module itself."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, has_name, other = homes[name].partition(":")
        module = import_module(home)
        return module if has_name and not other else getattr(module, other or name)

    return get
