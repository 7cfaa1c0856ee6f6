"""Lion: the sign of an interpolated momentum as the update, one state per element. Element by element: any sharding.

w' = w (1 - lr wd) - lr sign(b1 m + (1 - b1) g),   m' = b2 m + (1 - b2) g
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.engine.ownership import local


class Lion(Optimizer):
    """See the module. Its state has AdamW's name for the first moment."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("Lion takes no closure")
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        (first, second), rate = group["betas"], float(group["lr"])
        weights = [local(parameter.detach()) for parameter in parameters]
        gradients = [local(_gradient(parameter)) for parameter in parameters]
        moments = [local(self._moment(parameter)) for parameter in parameters]
        for weight, gradient, moment in zip(weights, gradients, moments, strict=True):
            update = moment.mul(first).add_(gradient, alpha=1 - first).sign_()
            weight.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
            moment.mul_(second).add_(gradient, alpha=1 - second)

    def _moment(self, parameter: nn.Parameter) -> Tensor:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state["exp_avg"]


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("the parameter has no gradient")
    return parameter.grad
