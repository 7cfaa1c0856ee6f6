"""Puts context parallelism around a Hugging Face model: its attention and masks go through `engine/cp/attention.py`.

The model's forward gets a part of each row's positions. Which models this is right for is asked of their own forward
(`models/cp/probe.py`); a model that mixes positions elsewhere is refused, with the module's name.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from weft.core.errors import ModelError, NotBuiltError
from weft.core.mixture import block_policies
from weft.core.plan import ContextParallel, Plan
from weft.engine.cp.attention import NAME, ContextAttention, attend, set_attention
from weft.engine.cp.context import CPContext
from weft.engine.mesh import Topology
from weft.engine.objective import is_hugging_face
from weft.engine.wrap_forward import wrap_own_forward
from weft.models.cp.mask_probe import passes_masks_through
from weft.models.cp.probe import why_not_divided
from weft.models.cp.ring_probe import why_not_in_ring
from weft.models.cp.softmax import own_function
from weft.models.layout import ModelLayout
from weft.models.positions import rotaries_that_follow

IMPLEMENTATIONS = ("sdpa", "eager")


def apply_context_parallel(
    model: nn.Module, plan: Plan, topology: Topology, *, layout: ModelLayout, has_own_objective: bool
) -> CPContext | None:
    """Divide the positions of rows over the ranks of cp; None without such ranks."""
    groups = topology.context
    if groups is None:
        return None
    inner = _require_supported(model, plan.context_parallel, has_own_objective=has_own_objective)
    tensor = plan.tensor_parallel
    multiple = plan.mesh.tp if tensor.mode == "1d" and tensor.sequence_parallel else 1
    context = CPContext(
        plan.context_parallel, groups, inner=inner, multiple=multiple, masks_in_pieces=passes_masks_through(model)
    )
    _register()
    recomputed = _recomputed_blocks(plan, layout)
    for name, module in model.named_modules():
        own = own_function(module, inner, _known)
        is_again = any(name.startswith(f"{block}.") for block in recomputed)
        is_fused = inner == "sdpa"
        attention = ContextAttention(
            plan.context_parallel,
            groups,
            own,
            name=name,
            is_fused=is_fused,
            keeps_gathered=is_again,
            attending=context.attending,
        )
        set_attention(module, attention)
    for rotary in rotaries_that_follow(model):
        wrap_own_forward(rotary, context.rotary)
    _use_own_configs(model)
    return context


def _require_supported(model: nn.Module, policy: ContextParallel, *, has_own_objective: bool) -> str:
    """The model's attention implementation; refuses what cannot be divided."""
    name = type(model).__name__
    if not is_hugging_face(model):
        raise NotBuiltError(
            f"context parallelism (mesh.cp > 1) needs a Hugging Face model, not {name}",
            hint="use mesh.cp = 1",
        )
    if has_own_objective:
        raise NotBuiltError(
            "context parallelism (mesh.cp > 1) with an objective of your own, which may need whole rows",
            hint="use mesh.cp = 1",
        )
    inner: str = model.config._attn_implementation  # type: ignore[union-attr, assignment]
    if inner not in IMPLEMENTATIONS:
        raise NotBuiltError(
            f"context parallelism (mesh.cp > 1) with model.attention = {inner!r}",
            hint=f"set model.attention to one of {', '.join(IMPLEMENTATIONS)}",
        )
    if reason := why_not_divided(model):
        raise ModelError(f"the sequence of {name} cannot be divided over ranks: {reason}", hint="use mesh.cp = 1")
    if policy.attention == "ring" and (reason := why_not_in_ring(model)):
        raise ModelError(
            f"context_parallel.attention = 'ring' cannot add up the attention of {name}: {reason}",
            hint="set context_parallel.attention = 'gather'",
        )
    return inner


def _recomputed_blocks(plan: Plan, layout: ModelLayout) -> list[str]:
    policies = block_policies(plan.activations.policy, plan.activations.mixture, num_blocks=len(layout.blocks))
    return [name for name, policy in zip(layout.blocks, policies, strict=True) if policy != "none"]


def _known(implementation: str) -> Any:
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping.get(implementation)


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(**kwargs: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    context = CPContext.active
    if context is None:
        raise RuntimeError("a model with context parallelism runs in its engine alone")
    return context.mask(ALL_MASK_ATTENTION_FUNCTIONS[context.inner], **kwargs)


def _use_own_configs(model: nn.Module) -> None:
    """Configs of this model alone: others built from the same ones keep their attention."""
    copies: dict[int, Any] = {}  # configs of parts are copied with the whole, and stay its parts
    for module in model.modules():
        config: Any = vars(module).get("config")
        if hasattr(config, "_attn_implementation_internal"):
            own = copy.deepcopy(config, copies)
            own._attn_implementation_internal = NAME
            vars(module)["config"] = own
