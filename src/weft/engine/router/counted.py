"""Counts choices in a subclass of the experts' own class, for modules that nothing else wraps.

A wrapped forward is another object in every layer: blocks would be compiled once per layer, and not at all beyond
torch's limit of recompilations. The class is the same in all layers.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor, nn

from weft.engine.router.sums import add_choices

_ROW, _COUNT = "_weft_choices", "_weft_num_experts"


def count_in_class(experts: nn.Module, row: Tensor, num_experts: int) -> None:
    """Add the choices of every training forward of `experts` to `row`."""
    setattr(experts, _ROW, row)
    setattr(experts, _COUNT, num_experts)
    experts.__class__ = _counted(type(experts))  # type: ignore[arg-type]  # classes are hashable


def count_choices(experts: nn.Module, index: Tensor) -> None:
    """For code that replaces the forward of such a class; nothing for other modules."""
    if experts.training and hasattr(experts, _ROW):
        add_choices(getattr(experts, _ROW), index, getattr(experts, _COUNT))


@functools.cache
def _counted(cls: type[nn.Module]) -> type[nn.Module]:
    name = list(inspect.signature(cls.forward).parameters)[2]

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count_choices(self, kwargs[name] if name in kwargs else args[1])
        return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})
