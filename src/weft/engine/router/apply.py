"""Builds the `Routers` of a model, before any forward is wrapped: finding them runs copies of its blocks."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.router_rules import check_router, with_capacity
from weft.core.run_spec import RouterSpec
from weft.engine.router.routers import Routers, require_routers
from weft.engine.router.wide import require_wide
from weft.models.ep.finder import find_expert_layout
from weft.models.ep.layout import ExpertLayout
from weft.models.ep.routers import RouterLayout, find_routers


def with_router_of(model: nn.Module, plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan for this model, and notes: where routers cannot compute in float32 and only the preset asks for it, they
    compute as the rest."""
    policy = plan.precision.policy()
    if not policy.has_wide_router or "router" in plan.precision.given:
        return plan, ()
    experts = find_expert_layout(model)
    if not experts.layers:
        return plan, ()
    declined = plan.has_delayed_updates or find_routers(model, experts).declined
    if not declined:
        return plan, ()
    why = f"not supported with {plan.delayed_by}" if declined is True else next(iter(declined.values()))
    precision = plan.precision.model_copy(update={"router": policy.weights})
    note = f"routers compute in {policy.weights}, not in float32: {why}"
    return plan.model_copy(update={"precision": precision}), (note,)


def find_and_build(model: nn.Module, plan: Plan, spec: RouterSpec, *, device: torch.device) -> Routers:
    """Empty without experts, and for pipelines that never flush: ranks end a step at different micro-batches."""
    for sentence, hint in check_router(plan, spec):
        raise NotBuiltError(sentence, hint=hint)
    spec = with_capacity(spec, plan)
    experts = find_expert_layout(model)
    is_wide = plan.precision.policy().has_wide_router and bool(experts.layers)
    found = find_routers(model, experts) if spec.reads_routers or is_wide else RouterLayout(routers={})
    require_routers(experts, found, spec, model_name=type(model).__name__)
    if is_wide:
        require_wide(found)
    if plan.has_delayed_updates:
        if is_wide:
            raise NotBuiltError(
                f"precision.router = 'float32' is not supported with {plan.delayed_by}",
                hint="use updates without a delay, or leave precision.router out",
            )
        experts = ExpertLayout(layers=())
    return Routers(model, experts, found, spec, is_wide=is_wide, device=device)
