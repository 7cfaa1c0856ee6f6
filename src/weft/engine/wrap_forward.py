"""Layers that the engine wraps around a module's forward, inside the module's hooks. No name changes.

    hooks( outermost layer( … innermost layer( the module's own forward )))

A hook runs once per forward; a layer is part of the forward, so recompute repeats it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from torch import nn

Forward = Callable[..., Any]
Layer = Callable[..., Any]  # layer(forward, *args, **kwargs) calls forward, or not


@runtime_checkable
class CompiledInside(Protocol):
    """A layer that is not compiled itself, around a function that is.

    `compiled(function)`, with `has_any_rows=True` if the number of its rows changes, returns the compiled one.
    """

    compiled: Forward | None

    def compile_inside(self, compiled: Callable[..., Forward]) -> None: ...


class _Layered:
    """A forward and the layers around it. An object, not a closure: a copied module must not call the original."""

    def __init__(self, own: Forward) -> None:
        functools.update_wrapper(self, own)  # transformers reads the signature of a model's forward
        self.own = own
        self.layers: list[Layer] = []  # innermost first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.own
        for layer in self.layers:
            call = functools.partial(layer, call)
        return call(*args, **kwargs)


def wrap_forward(module: nn.Module, layer: Layer) -> None:
    """Add `layer` as the outermost layer of `module`'s forward."""
    _layers_of(module).append(layer)


def wrap_own_forward(module: nn.Module, layer: Layer) -> None:
    """Add `layer` as the innermost layer of `module`'s forward, inside those of other axes."""
    _layers_of(module).insert(0, layer)


@contextmanager
def innermost_layer(module: nn.Module, layer: Layer) -> Iterator[None]:
    """`layer` as the innermost layer of `module`'s forward, inside the context."""
    layers = _layers_of(module)
    layers.insert(0, layer)
    try:
        yield
    finally:
        layers.remove(layer)


def is_wrapped(module: nn.Module) -> bool:
    """Whether the instance has a forward of its own."""
    return "forward" in vars(module)


def replace_own(module: nn.Module, change: Callable[[Forward], Forward]) -> None:
    """Replace `module`'s own forward, with the same layers around it."""
    _layers_of(module)
    layered: Any = module.forward
    layered.own = change(layered.own)


def layers_inside(model: nn.Module) -> Iterator[Any]:
    """The layers of all modules of `model`."""
    for module in model.modules():
        if isinstance(module.forward, _Layered):
            yield from module.forward.layers


def _layers_of(module: nn.Module) -> list[Layer]:
    if not isinstance(module.forward, _Layered):
        module.forward = _Layered(module.forward)
    return module.forward.layers
