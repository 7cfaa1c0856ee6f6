"""AdamW with low-precision moments and weights by itself: the optimizer, its gradients, float64 beside it."""

from __future__ import annotations

from typing import Any

import torch
from tolerances import LOW_MOMENT_REL, LOW_UPDATE_REL, LOW_WEIGHT_STEP
from torch import nn

from weft.core.shards import LocalShard, replicated_shard
from weft.engine.optim.adamw_low import AdamWLow, LowStates, Place
from weft.engine.optim.element_spans import spans_of
from weft.engine.optim.optimizers import decay_groups
from weft.engine.optim.rounding_bits import key_of

Parameters = dict[str, nn.Parameter]
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def low_optimizer(
    parameters: Parameters, moments: torch.dtype, *, seed: int = 0, shard: LocalShard | None = None, **adam: Any
) -> AdamWLow:
    """Over whole parameters, or over that shard of each."""
    places = {}
    for name, value in parameters.items():
        own = shard or replicated_shard(value.shape, copies=1)
        places[value] = Place(key=key_of(seed, name), spans=tuple(spans_of(own.chunks, own.shape)))
    groups = decay_groups(list(parameters.values()), 0.1)
    return AdamWLow(groups, states=LowStates(first=moments, second=moments, places=places), **{**ADAM, **adam})


def gradient(shape: Any, step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return 1e-3 * (torch.randn(shape, generator=generator) + 0.5)


def require_near_float64(parameters: Parameters, moments: torch.dtype, *, steps: int = 50) -> None:
    """So many steps beside torch's AdamW in float64, from the same start under the same gradients."""
    exact = [nn.Parameter(value.detach().double()) for value in parameters.values()]
    before = [value.detach().clone() for value in exact]
    low = low_optimizer(parameters, moments)
    right = torch.optim.AdamW(decay_groups(exact, 0.1), **ADAM)
    for step in range(steps):
        for index, (value, twin) in enumerate(zip(parameters.values(), exact, strict=True)):
            value.grad = gradient(twin.shape, step, index).to(value.device, value.dtype)
            twin.grad = value.grad.double()
        low.step()
        right.step()
    for value, twin, began in zip(parameters.values(), exact, before, strict=True):
        walk = steps**0.5 * LOW_WEIGHT_STEP * twin.norm() if value.dtype == torch.bfloat16 else 0.0
        assert (value.double() - twin).norm() <= LOW_UPDATE_REL * (twin - began).norm() + walk
        for key in ("exp_avg", "exp_avg_sq"):
            expected = right.state[twin][key]
            assert low.state[value][key].dtype == moments
            assert (low.state[value][key].double() - expected).norm() <= LOW_MOMENT_REL * expected.norm()
        assert low.state[value]["step"] == steps
