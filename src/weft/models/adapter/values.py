"""Values of a model with adapters: the base from its own source, factors from a PEFT folder or drawn.

A is uniform in +-1/sqrt(inputs), as PEFT initialises it (kaiming uniform, a = sqrt(5)), B is zero: the first forward is
the base's. A depends on (seed, name of its linear) alone, and is drawn on the CPU: equal in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import nn

from weft.core.adapter_spec import AdapterSpec
from weft.models.adapter.lora import FACTOR_A, factor_names
from weft.models.adapter.peft_folder import PeftFolder
from weft.models.initial import Reader, StoresBuffers, WeightSource, mixed_seed


class AdaptedWeights:
    """The source of a model with adapters; `base` is the source of the same model without."""

    def __init__(self, base: WeightSource, model: nn.Module, spec: AdapterSpec, *, seed: int) -> None:
        self.base, self._seed = base, seed
        self._shapes = {name: tuple(model.get_parameter(name).shape) for name in factor_names(model)}
        self._folder = PeftFolder(spec.path, self._shapes) if spec.path is not None else None

    @property
    def by_rule(self) -> list[str]:
        """Parameters of the base that its model's own code does not initialise."""
        return list(getattr(self.base, "by_rule", []))

    def buffer_names(self) -> list[str]:
        return self.base.buffer_names() if isinstance(self.base, StoresBuffers) else []

    def readers(self, names: Collection[str]) -> Iterator[tuple[str, Reader]]:
        yield from self.base.readers([name for name in names if name not in self._shapes])
        for name in names:
            if name in self._shapes:
                yield name, self._value(name).__getitem__

    def _value(self, name: str) -> torch.Tensor:
        if self._folder is not None:
            return self._folder.read(name)
        return initial_factor(name, self._shapes[name], seed=self._seed)


def initial_factor(name: str, shape: tuple[int, ...], *, seed: int) -> torch.Tensor:
    """The initial value of a factor, by its parameter name."""
    linear, _, factor = name.removesuffix(".weight").rpartition(".")
    if factor != FACTOR_A:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(mixed_seed(seed, linear))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
