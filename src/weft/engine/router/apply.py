"""Builds the `Routers` of a model, before any forward is wrapped: finding them runs copies of its blocks."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import RouterSpec
from weft.engine.router.routers import Routers, require_routers
from weft.models.ep.finder import find_expert_layout
from weft.models.ep.routers import RouterLayout, find_routers


def find_and_build(model: nn.Module, plan: Plan, spec: RouterSpec, *, device: torch.device) -> Routers | None:
    """None without experts, and for pipelines that never flush: ranks end a step at different micro-batches."""
    experts = find_expert_layout(model)
    found = find_routers(model, experts) if spec.is_active else RouterLayout(routers={})
    require_routers(experts, found, spec, model_name=type(model).__name__)
    if plan.has_delayed_updates:
        if spec.is_active:
            raise NotBuiltError(
                f"[router] needs one update per step, and {plan.pipeline.schedule} makes updates between micro-batches",
                hint="choose a pipeline.schedule that flushes, such as '1f1b', or leave [router] out",
            )
        return None
    return Routers(model, experts, found, spec, device=device) if experts.layers else None
