"""DDP of weights whose gradients are wider than they are: weights that rest in 16 bits, beside float32 gradients.

DDP's buckets have the dtype of its parameters. So it gets, for each weight, a leaf of the gradient's dtype, which has
the weight's shape and one number of memory. The unit's forward connects both; after the backward the weight's gradient
is that of the leaf, in its bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.engine.precision import connect_gradient_leaf, gradient_dtype


class GradientLeaves(nn.Module):
    """Calls `model`, which is no submodule: DDP sees the leaves alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._hidden = [model]
        self.names = list(trained)
        self.pairs = [(weight, _leaf(weight)) for weight in trained.values()]
        self.leaves = nn.ParameterList([leaf for _, leaf in self.pairs])
        for weight, leaf in self.pairs:
            connect_gradient_leaf(weight, leaf)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._hidden[0](*args, **kwargs)

    def show_gradients(self) -> None:
        for weight, leaf in self.pairs:
            weight.grad = leaf.grad

    def forget_gradients(self) -> None:
        for _, leaf in self.pairs:
            leaf.grad = None


def has_wide_gradients(model: nn.Module) -> bool:
    return any(gradient_dtype(one) != one.dtype for one in model.parameters() if one.requires_grad)


def _leaf(weight: nn.Parameter) -> nn.Parameter:
    # no values: a use beside the unit's forward would show at once
    value = torch.full((), float("nan"), dtype=gradient_dtype(weight), device=weight.device)
    return nn.Parameter(value.expand(weight.shape))
