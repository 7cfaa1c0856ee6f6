"""Schedule-free AdamW (arXiv:2405.15682): gradients at y, plain steps of z, evaluation at their average x.

    v' = b2 v + (1 - b2) g^2        d = g / (sqrt(v' / (1 - b2^t)) + eps) + wd y        y is the parameter
    s' = s + p^2, c = p^2 / s'      p: the largest rate so far, s: the sum of these weights
    y' = (1 - c) y + c z - lr (1 - b1 (1 - c)) d        z' = z - lr d
    x  = (y - (1 - b1) z) / b1

The rate is constant after its warm-up. Element by element: any sharding. States: z, v and three numbers; x takes no
memory, as it follows from y and z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.engine.ownership import local

BASE = "z"  # the state that plain steps move


class ScheduleFreeAdamW(Optimizer):
    """See the module."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("ScheduleFreeAdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        (first, second), rate, state = group["betas"], float(group["lr"]), self._state(parameter)
        step, largest, total = state["step"], state["largest_rate"], state["weight_sum"]
        step += 1
        largest.clamp_(min=rate)
        total += largest.square()
        share = (largest.square() / total.clamp(min=torch.finfo(total.dtype).tiny)).float()
        weight, base, square = (local(one) for one in (parameter.detach(), state[BASE], state["exp_avg_sq"]))
        gradient = local(parameter.grad).to(weight.dtype)  # type: ignore[arg-type]
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        corrected = square / (1 - second**step).float().to(square.device)
        direction = gradient / corrected.sqrt_().add_(group["eps"])
        direction.add_(weight, alpha=group["weight_decay"])
        share = share.to(weight.device)
        weight.lerp_(base, share).sub_(direction * (rate * (1 - first * (1 - share))))
        base.sub_(direction, alpha=rate)

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state[BASE] = parameter.detach().clone()
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            for name in ("step", "largest_rate", "weight_sum"):
                state[name] = torch.zeros((), dtype=torch.float64)
        return state


def evaluation_point(weight: Tensor, base: Tensor, first: float) -> Tensor:
    """x of y and z."""
    return (weight - (1 - first) * base) / first


def evaluation_points(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """x of every parameter that was updated, as local values; empty for other optimizers."""
    if not isinstance(optimizer, ScheduleFreeAdamW):
        return {}
    return {
        parameter: evaluation_point(
            local(parameter.detach()), local(optimizer.state[parameter][BASE]), group["betas"][0]
        )
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter in optimizer.state
    }
