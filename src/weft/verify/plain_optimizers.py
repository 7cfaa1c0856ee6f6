"""The optimizers of the reference: full tensors, torch's own classes without foreach, or formulas as in the papers.

Nothing here is the engine's. Every parameter is a group of its own, with its decay and its rate as a multiple of the
run's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from weft.core.parameter_groups import decay_of, ratio_of
from weft.core.run_spec import TrainSpec

_RATIO = "ratio"


def plain_optimizer(
    trainable: Mapping[str, nn.Parameter], train: TrainSpec, *, is_fused: bool, matrices: Collection[str] = ()
) -> Optimizer:
    """The optimizer of `train` over full parameters by name; fused only if asked, where torch has that.

    `matrices`: names of the parameters that muon makes orthogonal."""
    groups = [_group(name, parameter, train) for name, parameter in trainable.items()]
    if train.optimizer == "muon":
        return PlainMuon(groups, train, matrices)
    if train.optimizer == "adafactor":
        least = torch.finfo(torch.float32).eps, 1e-3  # torch's default depends on the dtype
        return Adafactor(groups, lr=train.learning_rate, eps=least, foreach=False)
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


class PlainAverage:
    """The exponential moving average of the weights, from the initial ones."""

    def __init__(self, trainable: Mapping[str, nn.Parameter], decay: float) -> None:
        self._trainable, self._decay = trainable, decay
        self._values = {name: value.detach().clone() for name, value in trainable.items()} if decay else {}
        self._updated: set[str] = set()

    def update(self) -> None:
        """After an update of the weights, before gradients are cleared."""
        for name, value in self._values.items():
            if self._trainable[name].grad is not None:
                value.mul_(self._decay).add_(self._trainable[name].detach(), alpha=1 - self._decay)
                self._updated.add(name)

    def states(self) -> dict[str, torch.Tensor]:
        return {f"{name}.ema": self._values[name] for name in self._values if name in self._updated}


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


class PlainMuon(Optimizer):
    """Matrices by Newton-Schulz of the whole matrix, one expert after the other; all else by torch's AdamW."""

    def __init__(self, groups: list[dict[str, Any]], train: TrainSpec, matrices: Collection[str]) -> None:
        self._train = train
        own = [group for group in groups if group["names"][0] in matrices]
        others = [group for group in groups if group["names"][0] not in matrices]
        self._rest = AdamW(others, lr=train.learning_rate, betas=train.betas, eps=train.epsilon, foreach=False)
        super().__init__([*own, *self._rest.param_groups], {"lr": train.learning_rate})
        self._own = own
        self._rest.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._rest.step()
        mu = self._train.muon_momentum
        for group in self._own:
            weight = group["params"][0]
            if weight.grad is None:
                continue
            buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
            buffer.copy_(mu * buffer + (1 - mu) * weight.grad)
            direction = (1 - mu) * weight.grad + mu * buffer
            rows, columns = weight.shape[-2:]
            wide = math.sqrt(max(1.0, rows / columns))
            scale = wide if self._train.muon_scale == "original" else 0.2 * math.sqrt(max(rows, columns))
            each = [self._orthogonal(matrix) for matrix in direction.reshape(-1, rows, columns)]
            update = torch.stack(each).view(weight.shape).to(weight.dtype)
            weight.copy_(weight * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * scale * update)

    def _orthogonal(self, matrix: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor
        asked = self._train.muon_precision
        is_low = asked == "bfloat16" or (asked == "auto" and matrix.is_cuda)
        x = matrix.to(torch.bfloat16 if is_low and matrix.dtype != torch.float64 else matrix.dtype, copy=True)
        x /= x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
            change = -4.7750 * gram + 2.0315 * (gram @ gram)
            x = 3.4445 * x + (change @ x if x.shape[0] <= x.shape[1] else x @ change)
        return x


class PlainScheduleFree(Optimizer):
    """v' = b2 v + (1 - b2) g^2, z' = z - lr (g / (sqrt(v' / (1 - b2^t)) + eps) + wd y), x' = (1 - c) x + c z' with
    c = p^2 / sum of p^2 for the largest rate p so far, y' = (1 - b1) z' + b1 x': y is the parameter, x is evaluated."""

    def __init__(self, groups: list[dict[str, Any]], train: TrainSpec) -> None:
        self._train = train
        self._averages: dict[torch.Tensor, torch.Tensor] = {}  # x
        super().__init__(groups, {"lr": train.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, weight.grad, float(group["lr"]), group["weight_decay"])

    def _move(self, weight: torch.Tensor, gradient: torch.Tensor, rate: float, decay: float) -> None:
        (first, second), state = self._train.betas, self._state(weight)
        state["step"] += 1
        state["largest_rate"].fill_(max(rate, state["largest_rate"].item()))
        state["weight_sum"] += state["largest_rate"] ** 2
        share = (state["largest_rate"] ** 2 / state["weight_sum"]).item() if state["weight_sum"] else 0.0
        base, average, square = state["z"], self._averages[weight], state["exp_avg_sq"]
        square.copy_(second * square + (1 - second) * gradient.square())
        root = (square / (1 - second ** state["step"].item())).sqrt()
        base.sub_(rate * (gradient / (root + self._train.epsilon) + decay * weight))
        average.copy_((1 - share) * average + share * base)
        weight.copy_((1 - first) * base + first * average)

    def _state(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[weight]
        if not state:
            state |= {"z": weight.detach().clone(), "exp_avg_sq": torch.zeros_like(weight)}
            state |= {name: torch.zeros((), dtype=torch.float64) for name in ("step", "largest_rate", "weight_sum")}
            self._averages[weight] = weight.detach().clone()
        return state

    def evaluated(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._averages.get(weight, weight) for name, weight in weights.items()}


def evaluated(optimizer: Optimizer, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The weights that are evaluated: with schedule-free AdamW their average."""
    return optimizer.evaluated(weights) if isinstance(optimizer, PlainScheduleFree) else weights


_OWN: dict[str, Callable[[list[dict[str, Any]], TrainSpec], Optimizer]] = {
    "lion": PlainLion,
    "schedule_free": PlainScheduleFree,
}
