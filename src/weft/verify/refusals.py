"""Runs and numbers of steps that `weft verify` cannot judge, known before ranks start. No torch."""

from __future__ import annotations

from weft.core.errors import NotBuiltError, PipelineError, PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.schedule import Calls

LEAST_DELAYED = 4  # steps of a plan with offload.delayed; the training loop restarts in the middle


def require_comparable(run: RunSpec) -> None:
    """Refuse runs whose numbers depend on the layout, so that no reference of one process exists."""
    router = run.router
    if router.balance_loss and router.balance_over != "batch":
        raise NotBuiltError(
            f"router.balance_over = {router.balance_over!r} depends on the layout, so no reference of one process "
            "exists",
            hint="verify with router.balance_over = 'batch', or with router.balance_loss = 0",
        )


def require_enough_steps(plan: Plan, *, steps: int) -> None:
    """Require enough steps to fill a pipeline that never drains: the last step, whose collectives are checked, must be
    full, and the evaluation after the first step drains.

    Called before ranks start."""
    pipeline = plan.pipeline
    if plan.offload.delayed and steps < LEAST_DELAYED:
        raise PlanError(
            f"{steps} steps do not show that offload.delayed delays updates by one step: the third is the first to "
            "read an update",
            hint=f"verify it with --steps {LEAST_DELAYED} or more",
        )
    if not plan.never_flushes:
        return
    calls = Calls(name=pipeline.schedule, num_ranks=plan.mesh.pp, num_microbatches=pipeline.microbatches)
    least = 2 + calls.delay
    if steps < least:
        raise PipelineError(
            f"{steps} steps do not fill {pipeline.schedule} over {plan.mesh.pp} ranks after the first evaluation",
            hint=f"verify it with --steps {least} or more",
        )
