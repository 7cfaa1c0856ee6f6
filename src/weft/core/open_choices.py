"""Choices that a plan may leave open: recompute mixture, offloaded blocks, dispatcher of experts, place of updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from weft.core.errors import PlanError
from weft.core.experts import choose_dispatcher
from weft.core.plan import Plan

UpdatePlace = Literal["device", "host"]


def require_mixture(plan: Plan, *, num_blocks: int) -> None:
    """Require a resolved mixture of at most `num_blocks`: the engine has no cost model to choose one."""
    if plan.activations.is_open:
        raise PlanError(
            "activations.policy = 'budget' has no activations.mixture",
            hint="weft train, dryrun and bench choose one for the device's memory; otherwise set activations.mixture "
            "= [full, selective]",
        )
    recomputed = sum(plan.activations.mixture or ())
    if recomputed > num_blocks:
        raise PlanError(
            f"activations.mixture = {list(plan.activations.mixture or ())} is {recomputed} blocks, but the model has "
            f"{num_blocks}",
            hint=f"set two numbers that add up to at most {num_blocks}, or [] to have them chosen",
        )


def with_dispatcher(plan: Plan, layers: Iterable[tuple[int, int | None]]) -> Plan:
    """The plan with a chosen dispatcher; `layers` as in `choose_dispatcher`."""
    if not plan.has_open_dispatcher:
        return plan
    chosen = plan.expert_parallel.model_copy(update={"dispatcher": choose_dispatcher(layers, ep=plan.mesh.ep)})
    return plan.model_copy(update={"expert_parallel": chosen})


def with_mixture(plan: Plan, mixture: tuple[int, int]) -> Plan:
    """The plan with this mixture."""
    return plan.model_copy(update={"activations": plan.activations.model_copy(update={"mixture": mixture})})


def with_offloaded_blocks(plan: Plan, number: int) -> Plan:
    """The plan with so many blocks whose saved tensors are kept on the host."""
    return plan.model_copy(update={"activations": plan.activations.model_copy(update={"offload_blocks": number})})


def has_open_update(plan: Plan) -> bool:
    """Whether the place where offloaded states are updated is still to be chosen."""
    return plan.offload.optimizer != "none" and plan.offload.update == "auto"


def update_place(plan: Plan, *, device_type: str) -> UpdatePlace | None:
    """Where offloaded states are updated; None without offload. A GPU has a faster link than the host has cores."""
    if plan.offload.optimizer == "none":
        return None
    if plan.offload.update != "auto":
        return plan.offload.update
    return "host" if device_type == "cpu" else "device"


def with_update_place(plan: Plan, *, device_type: str) -> Plan:
    """The plan with a chosen place of the update."""
    place = update_place(plan, device_type=device_type)
    return plan if place is None else with_update(plan, place)


def with_update(plan: Plan, place: UpdatePlace) -> Plan:
    """The plan with this place of its update."""
    return plan.model_copy(update={"offload": plan.offload.model_copy(update={"update": place})})
