"""The optimizers of the reference: full tensors, torch's own classes without foreach, or formulas as in the papers.

Nothing here is the engine's. Every parameter is a group of its own, with its decay and its rate as a multiple of the
run's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from weft.core.parameter_groups import decay_of, ratio_of
from weft.core.run_spec import TrainSpec

_RATIO = "ratio"


def plain_optimizer(trainable: Mapping[str, nn.Parameter], train: TrainSpec, *, is_fused: bool) -> Optimizer:
    """The optimizer of `train` over full parameters by name; fused only if asked, where torch has that."""
    groups = [_group(name, parameter, train) for name, parameter in trainable.items()]
    own = _OWN.get(train.optimizer)
    if own is not None:
        return own(groups, train)
    if train.optimizer == "sgd":
        return SGD(groups, lr=train.learning_rate, momentum=train.momentum, foreach=False, fused=is_fused)
    kind = Adam if train.optimizer == "adam" else AdamW
    return kind(groups, lr=train.learning_rate, betas=train.betas, eps=train.epsilon, foreach=False, fused=is_fused)


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """The rates of all groups, for a run's rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group[_RATIO]


def _group(name: str, parameter: nn.Parameter, train: TrainSpec) -> dict[str, Any]:
    decay = decay_of(name, train.groups, num_dims=parameter.ndim, weight_decay=train.weight_decay)
    ratio = ratio_of(name, train.groups, peak=train.learning_rate)
    return {"params": [parameter], "names": [name], "weight_decay": decay, _RATIO: ratio}


class PlainLion(Optimizer):
    """w <- w (1 - lr wd) - lr sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g."""

    def __init__(self, groups: list[dict[str, Any]], train: TrainSpec) -> None:
        self._betas = train.betas
        super().__init__(groups, {"lr": train.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        first, second = self._betas
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                moment = state.setdefault("exp_avg", torch.zeros_like(weight))
                direction = torch.sign(first * moment + (1 - first) * weight.grad)
                weight.copy_(weight * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction)
                moment.copy_(second * moment + (1 - second) * weight.grad)


_OWN: dict[str, Callable[[list[dict[str, Any]], TrainSpec], Optimizer]] = {"lion": PlainLion}
