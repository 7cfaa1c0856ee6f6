"""An exponential moving average of the weights (EMA), sharded as the weights, and evaluation with average weights.

    e' = d e + (1 - d) w'     after every update that was made; e starts as the initial weights

The average is a state of the optimizer named `ema`: it lies where the shard lies, in float32, and checkpoints, other
layouts and verification treat it as a moment. Training never reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.engine.ownership import local

EMA = "ema"


def attach_average(optimizer: Optimizer, decay: float) -> None:
    """Keep the average of every parameter from the next update on."""
    started: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def before(of: Optimizer, _args: Any, _kwargs: Any) -> None:
        # not in the state yet: torch's optimizers make theirs only where there is none at all
        for parameter in _updated(of):
            if EMA not in of.state.get(parameter, {}):
                started[parameter] = parameter.detach().clone().float()

    @torch.no_grad()
    def after(of: Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter in _updated(of):
            state = of.state[parameter]
            if EMA not in state:
                state[EMA] = started.pop(parameter)
            add_to_average(local(state[EMA]), local(parameter.detach()), 1 - decay)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def add_to_average(average: Tensor, weight: Tensor, share: float) -> None:
    average.lerp_(weight.float(), share)


def _updated(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.grad is not None)


@contextmanager
def exchanged(values: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Other local values of parameters inside; both sides are as before afterwards, to the bit."""
    kept = _exchange(values)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in kept.items():
                local(parameter.detach()).copy_(before)
        _exchange({parameter: value for parameter, value in values.items() if parameter not in kept})


@torch.no_grad()
def _exchange(values: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
    """Swap in place, tensor by tensor; copies of the weights whose dtype is another one."""
    kept = {}
    for parameter, value in values.items():
        weight, other = local(parameter.detach()), local(value)
        before = weight.clone()
        weight.copy_(other)
        if other.dtype == weight.dtype:
            other.copy_(before)
        else:
            kept[parameter] = before
    return kept


def averages_of(optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
    """The averages that exist: of all parameters that had a gradient."""
    states: Mapping[Any, dict[str, Tensor]] = optimizer.state
    return {parameter: state[EMA] for parameter, state in states.items() if EMA in state}
