"""The optimizer of a plan: where its update runs, and which of its states rest in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from weft.core.errors import NotBuiltError
from weft.core.masters import resting_dtype
from weft.core.open_choices import update_place
from weft.core.optimizers import not_executed_with
from weft.core.plan import Plan
from weft.core.shards import LocalShard
from weft.engine.optim.adamw_low import LowStates
from weft.engine.optim.optimizers import OptimizerFactory, OptimizerPolicy, make_optimizer
from weft.engine.precision import torch_dtype


def optimizer_for(
    named: Mapping[str, nn.Parameter],
    given: OptimizerPolicy | OptimizerFactory | str,
    plan: Plan,
    *,
    seed: int,
    shards: Mapping[str, LocalShard],
    copies: Mapping[str, str],
    device: torch.device,
) -> Optimizer:
    """Build the engine's `optimizer` argument under `plan`."""
    if isinstance(given, str):
        given = OptimizerPolicy(kind=given)  # type: ignore[arg-type]
    if isinstance(given, OptimizerPolicy):
        for sentence, hint in not_executed_with(given.kind, plan):
            raise NotBuiltError(sentence, hint=hint)
    at_rest = torch_dtype(resting_dtype(plan))
    found = LowStates.of(named, plan.precision.policy(), seed=seed, shards=shards, copies=copies, at_rest=at_rest)
    on_host = update_place(plan, device_type=device.type) == "host"
    low = None if on_host and found and not found.rounds else found  # its float32 form is a GPU's kernel
    return make_optimizer(named, given, low=low, shards=shards)
