"""Freezes parameters by patterns of names (`train.frozen`)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from weft.core.errors import BadValueError


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name matches a pattern get no gradient; a pattern without a match is an error."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise BadValueError(
                f"train.frozen: no parameter matches {pattern!r}",
                hint=f"names look like {names[0]!r}; * matches anything",
            )
        for name in matched:
            model.get_parameter(name).requires_grad_(False)
