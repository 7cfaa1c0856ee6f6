"""Routers in float32, whatever the precision of the rest: product, scores and top-k.

A router's inputs and parameters are cast around its own forward; gradients flow back through the casts. It is part of
the forward, so it is repeated in a recomputed one. The experts get their weights in the dtype that the model's code
gives them.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from weft.core.errors import NotBuiltError
from weft.engine.kernels.wide import InFloat32
from weft.engine.wrap_forward import Forward, wrap_forward
from weft.models.ep.routers import Router, RouterLayout


def require_wide(found: RouterLayout) -> None:
    """Refuse models whose routers were not found: they would compute in 16 bits silently."""
    if found.declined:
        name, reason = next(iter(found.declined.items()))
        raise NotBuiltError(
            f"the router of {name} was not found, so it cannot compute in float32: {reason}",
            hint="set precision.router to the format of the weights",
        )


def widen(model: nn.Module, router: Router) -> None:
    """Wrap the router, and its experts if they get narrow weights."""
    module = model.get_submodule(router.name)
    wrap_forward(module, InFloat32(module))
    if router.weights_follow:
        experts = model.get_submodule(router.experts)
        wrap_forward(experts, _NarrowWeights(experts))


class _NarrowWeights:
    def __init__(self, experts: nn.Module) -> None:
        self._names = list(inspect.signature(type(experts).forward).parameters)[1:]

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, index, weights = (given.pop(name) for name in self._names[:3])
        return forward(hidden, index, weights.to(hidden.dtype), **given)
