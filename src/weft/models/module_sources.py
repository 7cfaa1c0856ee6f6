"""The source text of a model's own code, for questions about what its forwards call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable

from torch import nn


def module_sources(kinds: Iterable[type[nn.Module]], *, without: Collection[str] = ()) -> list[str] | None:
    """The source files of the classes, except torch's and those in `without`; None if one cannot be read."""
    names = {kind.__module__ for kind in kinds} - set(without)
    try:
        return [inspect.getsource(sys.modules[name]) for name in names if not name.startswith("torch.")]
    except (OSError, TypeError, KeyError):
        return None
