"""Bugs of optimizers whose update needs more than a rank's own elements. Each trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import weft.engine.engine_state as engine_state
import weft.engine.optim.adafactor as adafactor
import weft.engine.optim.averages as averages
import weft.engine.optim.matrix_owners as owners
import weft.engine.optim.muon as muon
from weft.engine.optim.schedule_free import ScheduleFreeAdamW
from weft.engine.ownership import local


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
    return patch.object(owner, name, make(getattr(owner, name)))


def newton_schulz_of_the_shard() -> Any:
    """Every rank takes its own rows for the matrix."""

    def make(original: Any) -> Any:
        def update(self: Any, group_of: Any) -> None:
            for parameter, group in group_of.items():
                buffer = local(self.state[parameter]["momentum_buffer"])
                direction = local(parameter.grad).lerp(buffer, group["momentum"])
                if direction.numel():
                    changed = muon.orthogonalised(direction, torch.float32)
                    scale = muon.rate_scale(self._scale, *parameter.shape[-2:])
                    weight = local(parameter.detach())
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(changed, alpha=-group["lr"] * scale)

        return update

    return _replaced(muon.Muon, "_update", make)


def matrix_of_another_owner() -> Any:
    """The blocks that come back are those of the rank before."""

    def make(original: Any) -> Any:
        def exchange(self: Any, read: Any, change: Any, write: Any, **how: Any) -> None:
            original(self, read, lambda key, matrix: change(key, matrix).roll(1, 0), write, **how)

        return exchange

    return _replaced(owners.MatrixOwners, "exchange", make)


def means_of_the_shard() -> Any:
    """Sums of squares stay on the rank."""
    return _replaced(adafactor, "sum_over", lambda _: lambda values, group: values)


def average_before_the_update_on_one_rank() -> Any:
    """Rank 1 adds the weights that the update began with."""

    def make(original: Any) -> Any:
        def lerp(average: torch.Tensor, weight: torch.Tensor, share: float) -> None:
            if dist.get_rank() == 1:
                weight = weight * 0.999
            original(average, weight, share)

        return lerp

    return _replaced(averages, "add_to_average", make)


def trained_weights_are_evaluated() -> Any:
    """The average stays aside."""
    return _replaced(engine_state, "evaluation_points", lambda _: lambda optimizer: {})


def steps_weigh_alike_on_one_rank() -> Any:
    """Rank 1 takes every step of the warm-up for one of the full rate."""

    def make(original: Any) -> Any:
        def update(self: Any, parameter: Any, group: Any) -> None:
            if dist.get_rank() == 1:
                state = self._state(parameter)
                state["weight_sum"].copy_(state["step"] * group["lr"] ** 2)
            original(self, parameter, group)

        return update

    return _replaced(ScheduleFreeAdamW, "_update", make)
