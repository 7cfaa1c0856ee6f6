"""Layouts that cannot train with a key of [router] in run.toml, each with a hint: for planner and engine alike."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.plan import Plan
from weft.core.run_spec import RouterSpec


def with_capacity(spec: RouterSpec, plan: Plan) -> RouterSpec:
    """`spec` with the capacity that the plan gives it."""
    factor = plan.expert_parallel.capacity_factor
    return spec.model_copy(update={"capacity_factor": factor}) if factor else spec


def check_router(plan: Plan, spec: RouterSpec) -> Iterator[tuple[str, str]]:
    """Every reason against `spec` under `plan`, as (sentence, hint)."""
    planned = plan.expert_parallel.capacity_factor
    if planned and spec.capacity_factor not in (0, planned):
        yield (
            f"expert_parallel.capacity_factor of the plan is {planned:g}, but router.capacity_factor of the run is "
            f"{spec.capacity_factor:g}",
            "leave one of the two out",
        )
    spec = with_capacity(spec, plan)
    if spec.is_active and plan.has_delayed_updates:
        yield (
            f"[router] needs an update at the end of its step, and {plan.delayed_by} delays updates",
            "choose a pipeline.schedule that flushes, such as '1f1b', without offload.delayed, or leave [router] out",
        )
    if spec.capacity_factor and has_sequence_slices(plan):
        why, hint = _slices(plan)
        sentence = f"router.capacity_factor counts the tokens of full sequences, and with {why} a rank has a slice"
        yield sentence, f"{hint}, or router.capacity_factor = 0"
    if spec.balance_loss and spec.balance_over == "transformers":
        yield from _check_pooled(plan)


def _check_pooled(plan: Plan) -> Iterator[tuple[str, str]]:
    """One loss over the micro-batch and all layers."""
    asked = "router.balance_over = 'transformers'"
    if plan.mesh.pp > 1:
        yield f"{asked} needs the choices of all layers on each rank", "use mesh.pp = 1, or balance_over = 'batch'"
    if has_sequence_slices(plan):
        why, hint = _slices(plan)
        sentence = f"{asked} needs the choices of full sequences, and with {why} a rank has a slice"
        yield sentence, f"{hint}, or router.balance_over = 'batch'"
    if plan.compile.enabled:
        yield (
            f"{asked} is not supported in compiled blocks: the gradient of a layer depends on later ones",
            "set compile.enabled = false, or router.balance_over = 'batch'",
        )


def has_sequence_slices(plan: Plan) -> bool:
    """Whether a router sees a slice of each sequence."""
    tensor = plan.tensor_parallel
    return plan.mesh.cp > 1 or (plan.mesh.tp > 1 and tensor.mode == "1d" and tensor.sequence_parallel)


def _slices(plan: Plan) -> tuple[str, str]:
    """(what slices the sequence, how to have it in full)."""
    if plan.mesh.cp > 1:
        return "context parallel", "set mesh.cp = 1"
    return "sequence parallel", "set tensor_parallel.sequence_parallel = false"
