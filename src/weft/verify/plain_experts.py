"""The experts of the reference: the choices that they get, and the drops over their capacity, written out.

It shares no code with the engine. Modules of experts are those of transformers' classes *Experts.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

Choices = dict[str, Tensor]  # by module: [tokens of the global batch, experts per token]


class PlainExperts:
    """Hooks on the experts of a plain model, in training."""

    def __init__(self, model: nn.Module, *, capacity_factor: float) -> None:
        self._factor = Fraction(str(capacity_factor))
        self.sequence_length = 0  # of the next forward
        self._choices: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._drops: defaultdict[str, int] = defaultdict(int)
        for name, module in plain_experts(model).items():
            module.register_forward_pre_hook(functools.partial(self._enter, name), with_kwargs=True)

    def take(self) -> tuple[Choices, dict[str, int]]:
        """Choices and drops since the last call."""
        choices = {name: torch.cat(parts) for name, parts in self._choices.items()}
        drops = dict(self._drops)
        self._choices.clear()
        self._drops.clear()
        return choices, drops

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not module.training:
            return None
        (hidden, index, weights), others = by_position(module, args, kwargs)
        self._choices[name].append(index.detach().cpu())
        if self._factor:
            kept = self._kept(index.detach().cpu(), num_experts=_stacked(module)).to(index.device)
            self._drops[name] += int((~kept).sum())
            weights = torch.where(kept, weights, torch.zeros_like(weights))
        return (hidden, index, weights), others

    def _kept(self, index: Tensor, *, num_experts: int) -> Tensor:
        """Per sequence and expert: the first tokens, as many as the capacity."""
        length = self.sequence_length
        capacity = -int(-(self._factor * length * index.shape[1]) // num_experts)
        kept = index >= num_experts
        for begin in range(0, len(index), length):
            for expert in range(num_experts):
                token, slot = torch.nonzero(index[begin : begin + length] == expert, as_tuple=True)
                kept[begin + token[:capacity], slot[:capacity]] = True
        return kept


def plain_experts(model: nn.Module) -> dict[str, nn.Module]:
    """By name: modules whose own parameters are stacked as [experts, ...], called with choices and weights."""
    return {
        name: module
        for name, module in model.named_modules()
        if "Experts" in type(module).__name__
        and _stacked(module)
        and len(inspect.signature(type(module).forward).parameters) > 3
    }


def by_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Tokens, choices and weights of a call, and its other arguments.

    Families name the three differently, and transformers' own kernels know one of the names: pass them by position.
    """
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden, index, weights = (given.pop(name) for name in names[:3])
    return (hidden, index, weights), given


def _stacked(module: nn.Module) -> int:
    """The number of experts; 0 for other modules."""
    sizes = [value.shape[0] for value in module._parameters.values() if value is not None and value.ndim == 3]
    return sizes[0] if sizes else 0
