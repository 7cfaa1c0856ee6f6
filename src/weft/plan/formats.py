"""The formats of a plan, component by component, and the bytes that each costs per parameter: `--explain precision`.

at rest    master weights, moments, gradients: bytes that a parameter has between micro-batches, before sharding
else       bytes of one parameter while it is cast, gathered or reduced
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.core.optimizers import OPTIMIZERS
from weft.core.plan import Plan
from weft.core.precision import COMPONENTS, GROUPS
from weft.core.precision_presets import PRESETS
from weft.core.wire_bytes import wire_bytes
from weft.plan.request import QUANTISED_BLOCK, Request

_BYTES = {
    "float32": 4.0,
    "tf32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8_e4m3": 1.0,
    "float4_e2m1": 0.5,
    "int8": 1.0,
}
_AT_REST = ("master_weights", "first_moment", "second_moment", "gradients")
# components of collectives, and whether a plan has them
_COLLECTIVE: dict[str, Callable[[Plan], bool]] = {
    "gather": lambda plan: plan.data_parallel.zero > 0 and plan.mesh.dp_shard > 1,
    "reduce": lambda plan: plan.mesh.dp_degree > 1,
    "dispatch": lambda plan: plan.mesh.ep > 1,
    "combine": lambda plan: plan.mesh.ep > 1,
}
_OF_PARAMETERS = (*_AT_REST, "weights", "gather", "reduce")


@dataclass(frozen=True, kw_only=True)
class FormatRow:
    """One component."""

    component: str
    format: str
    why: str  # what decided the format
    bytes_per_parameter: float = 0.0  # 0: not a component of parameters, or absent from this plan
    is_at_rest: bool = False


def explain_precision(request: Request, plan: Plan) -> list[FormatRow]:
    """Every component of the plan, in the order of `core.precision`."""
    return [_row(name, request, plan) for name in COMPONENTS]


def preset_as_dict(plan: Plan) -> dict[str, str]:
    data = PRESETS[plan.precision.preset]
    return {"name": plan.precision.preset, "source": data.source, "untold": data.untold}


def _row(name: str, request: Request, plan: Plan) -> FormatRow:
    value = str(getattr(plan.policy(), name))
    size = _BYTES[value] if name in _OF_PARAMETERS and _is_present(name, request, plan) else 0.0
    if name in ("first_moment", "second_moment") and request.workload.optimizer == "adamw8bit":
        value, size = "8 bits", 1 + 4 / QUANTISED_BLOCK
    if size and (name == "reduce" or (name == "gather" and plan.coded_gather)):
        size = wire_bytes(value)
    return FormatRow(
        component=name,
        format=value,
        why=_why(name, plan),
        bytes_per_parameter=size,
        is_at_rest=name in _AT_REST,
    )


def _is_present(name: str, request: Request, plan: Plan) -> bool:
    policy, work = plan.policy(), request.workload
    if name in _COLLECTIVE:
        return _COLLECTIVE[name](plan)
    return {
        "weights": policy.is_mixed,  # else they are the masters themselves
        "first_moment": work.optimizer != "sgd" or work.momentum > 0,
        "second_moment": OPTIMIZERS[work.optimizer].has_second,
    }.get(name, True)


def _why(name: str, plan: Plan) -> str:
    if name in _COLLECTIVE and not _COLLECTIVE[name](plan):
        return "not in this layout"
    given, preset = plan.precision.given, PRESETS[plan.precision.preset].components
    keys = [name, *(group for group, parts in GROUPS.items() if name in parts)]
    for key in keys:
        if key in given:
            return f"precision.{key}"
    if getattr(plan.policy(), name) != getattr(plan.precision.policy(), name):
        return {"dispatch": "expert_parallel.wire", "gather": "float8.gather", "experts": "float8.experts"}.get(
            name, "float8.linears"
        )
    return "preset" if any(key in preset for key in keys) else "follows"
