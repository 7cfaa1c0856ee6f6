"""Routers in float32, whatever the precision of the rest: product, scores and top-k.

A router's inputs and parameters are cast around its own forward; gradients flow back through the casts. It is part of
the forward, so it is repeated in a recomputed one. The experts get their weights in the dtype that the model's code
gives them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.core.errors import NotBuiltError
from weft.engine.kernels.wide import InFloat32
from weft.engine.wrap_forward import Forward, is_wrapped, wrap_forward
from weft.models.ep.routers import Router, RouterLayout

Call = Callable[..., Any]  # call(module, forward, *args, **kwargs)


def require_wide(found: RouterLayout) -> None:
    """Refuse models whose routers were not found: they would compute in 16 bits silently."""
    if found.declined:
        name, reason = next(iter(found.declined.items()))
        raise NotBuiltError(
            f"the router of {name} was not found, so it cannot compute in float32: {reason}",
            hint="set precision.router to the format of the weights",
        )


def widen(model: nn.Module, router: Router) -> None:
    """Change the router, and its experts if they get narrow weights.

    In their classes where nothing wraps them: compiled blocks that are alike share a graph (`counted.py`).
    """
    _change(model.get_submodule(router.name), _call_wide)
    if router.weights_follow:
        _change(model.get_submodule(router.experts), _call_with_narrow_weights)


def _change(module: nn.Module, call: Call) -> None:
    # a layer of torch's own is known by its exact class elsewhere
    if is_wrapped(module) or type(module).__module__.startswith("torch."):
        wrap_forward(module, functools.partial(call, module))
    else:
        module.__class__ = _changed(type(module), call)  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _changed(cls: type[nn.Module], call: Call) -> type[nn.Module]:
    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, functools.partial(cls.forward, self), *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def _call_wide(router: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    return InFloat32(router)(forward, *args, **kwargs)


def _call_with_narrow_weights(experts: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    names = _parameters_of(type(experts))  # type: ignore[arg-type]  # classes are hashable
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden, index, weights = (given.pop(name) for name in names[:3])
    return forward(hidden, index, weights.to(hidden.dtype), **given)


@functools.cache
def _parameters_of(cls: type[nn.Module]) -> tuple[str, ...]:
    """Of its forward."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]
