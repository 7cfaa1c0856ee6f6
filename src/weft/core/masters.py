"""Where master weights are kept under offload: one rule for planner and engine.

    masters leave the device    states are offloaded, and in files, or weights leave too, or offload.masters = "host";
                                and masters are wider than the compute dtype

Then weights rest in the compute dtype, and the master is one more offloaded state; else weights are their own masters.
"""

from __future__ import annotations

from typing import Any

from weft.core.plan import Plan
from weft.core.precision import Format

BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def masters_leave(
    *, has_offloaded_states: Any, are_in_files: Any, weights_leave: Any, is_asked: Any, is_wider: Any
) -> Any:
    """The rule, of Python bools or of columns of plans."""
    return has_offloaded_states & (are_in_files | weights_leave | is_asked) & is_wider


def has_masters_away(plan: Plan) -> bool:
    """Whether the masters of `plan` are kept with its offloaded states."""
    offload = plan.offload
    return bool(
        masters_leave(
            has_offloaded_states=offload.optimizer != "none",
            are_in_files=offload.optimizer == "nvme",
            weights_leave=offload.parameters != "none",
            is_asked=offload.masters == "host",
            is_wider=has_wide_masters(plan),
        )
    )


def has_wide_masters(plan: Plan) -> bool:
    """Whether masters are wider than the weights that compute."""
    policy = plan.precision.policy()
    return BYTES[policy.master_weights] > BYTES[policy.weights]


def with_streamed_units(plan: Plan) -> Plan:
    """The plan with the ZeRO stage that runs it: weights on the host come unit by unit, on one rank too."""
    if plan.offload.parameters == "none" or plan.data_parallel.zero > 0:
        return plan
    return plan.model_copy(update={"data_parallel": plan.data_parallel.model_copy(update={"zero": 3})})


def resting_dtype(plan: Plan) -> Format:
    """The dtype of weights between steps."""
    policy = plan.precision.policy()
    return policy.weights if has_masters_away(plan) else policy.master_weights
