"""The optimizers of `train.optimizer`: the states of each, and the plans that it is not executed with.

Planner, refusals and documents read this table; `engine/optim` has the updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weft.core.plan import Plan

OptimizerKind = Literal["adamw", "adam", "sgd", "adamw8bit", "lion", "muon", "adafactor", "schedule_free"]


@dataclass(frozen=True, kw_only=True)
class OptimizerTraits:
    """What a plan and its prediction need to know of an optimizer."""

    has_first: bool = True  # one state per element like a first moment (without momentum, sgd has none)
    has_second: bool = False
    has_kernels: bool = False  # torch's fused and foreach forms
    is_plain: bool = False  # in every layout, host memory and files, with low precision: all that `Plan` can say


OPTIMIZERS: dict[OptimizerKind, OptimizerTraits] = {
    "adamw": OptimizerTraits(has_second=True, has_kernels=True, is_plain=True),
    "adam": OptimizerTraits(has_second=True, has_kernels=True, is_plain=True),
    "sgd": OptimizerTraits(has_kernels=True, is_plain=True),
    "adamw8bit": OptimizerTraits(has_second=True, is_plain=True),
    "lion": OptimizerTraits(),
    "muon": OptimizerTraits(has_second=True),  # of parameters that are no matrices of blocks
    "schedule_free": OptimizerTraits(has_second=True),  # like a first moment: the weights that plain steps move
    "adafactor": OptimizerTraits(has_first=False, has_second=True),  # of vectors; rows and columns of matrices
}
ROWS_ARE_SHARDED = "8-bit moments need full rows, and tensor parallelism shards rows"
NAMES = " | ".join(OPTIMIZERS)


def is_averaged(kind: str) -> bool:
    """Whether the optimizer evaluates at an average of its own, which exports hold."""
    return kind == "schedule_free"


def not_executed_with(kind: str, plan: Plan, *, ema_decay: float = 0.0) -> Iterator[tuple[str, str]]:
    """Features of the plan that this optimizer, or an average of weights, is not executed with: (sentence, hint)."""
    for is_refused, what, hint in (
        (plan.offload.optimizer != "none", "offload.optimizer", "leave [offload] out of the plan"),
        (plan.has_delayed_updates, plan.delayed_by, "choose a schedule that drains"),
    ):
        if ema_decay and is_refused:
            yield f"train.ema_decay is not executed with {what}", f"set train.ema_decay = 0, or {hint}"
    if kind == "adamw8bit" and plan.mesh.tp > 1:
        yield ROWS_ARE_SHARDED, "use train.optimizer = 'adamw', or mesh.tp = 1"
    traits = OPTIMIZERS.get(kind)  # type: ignore[call-overload]
    if traits is None or traits.is_plain:
        return
    policy = plan.precision.policy()
    for is_refused, what, hint in (
        (plan.offload.optimizer != "none", "offload.optimizer", "leave [offload] out of the plan"),
        (plan.has_delayed_updates, plan.delayed_by, "choose a schedule that drains"),
        (policy.has_low_states, "states or weights in bfloat16", "leave precision.optimizer_state and master_weights"),
        (policy.has_own_gradients, "gradients of their own dtype", "leave precision.gradients at its preset"),
    ):
        if is_refused:
            yield f"train.optimizer = {kind!r} is not executed with {what}", f"use train.optimizer = 'adamw', or {hint}"
