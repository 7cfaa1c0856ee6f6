"""Whether the run's model can be divided as the plan says: the planner's rules of its shape, before ranks start.

The engine asks the model itself and has the last word; a model that the planner has no shape of passes here. For a
model of the caller's own, which [model] does not describe, nobody calls this.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.errors import ModelError, NotBuiltError, PipelineError, PlanError, TensorParallelError, WeftError
from weft.core.isolation import why_not_isolated
from weft.core.model_shape import ModelShape
from weft.core.open_choices import with_mixture, with_offloaded_blocks
from weft.core.plan import Plan
from weft.core.router_rules import with_capacity
from weft.core.run_spec import RunSpec
from weft.plan.legality import known_shape

_TENSOR = (
    *("heads", "key_value_heads", "widths", "vocabulary", "regions", "stream", "float8_blocks"),
    *("tensor_mode", "grid"),
)
_STAGES = ("stages", "blocks", "tied_updates")
_BLOCKS = ("mixture", "offloaded_blocks")


def require_model_fits(plan: Plan, run: RunSpec) -> None:
    """Raise the first reason against dividing the run's model."""
    for error in model_reasons(plan, run):
        raise error


def model_reasons(plan: Plan, run: RunSpec) -> Iterator[WeftError]:
    mesh, has_router = plan.mesh, with_capacity(run.router, plan).is_active
    counts_blocks = plan.activations.mixture is not None or plan.activations.offload_blocks != 0
    if not (mesh.tp > 1 or mesh.pp > 1 or counts_blocks or run.data.isolates or has_router):
        return
    shape = known_shape(run)
    if shape is None:
        return
    if has_router and not shape.expert_layers:
        key, where = (
            ("[router]", "run.toml") if run.router.is_active else ("expert_parallel.capacity_factor", "the plan")
        )
        yield ModelError(f"{key} does not apply to {shape.name}: it has no experts", hint=f"leave {key} out of {where}")
    reason = why_not_isolated(shape.model_type) if run.data.isolates else None
    if reason is not None:
        yield NotBuiltError(reason[0], hint=reason[1])
    for is_asked, names, kind in (
        (mesh.tp > 1, _TENSOR, TensorParallelError),
        (mesh.pp > 1, _STAGES, PipelineError),
        (counts_blocks, _BLOCKS, PlanError),
    ):
        for sentence, hint in _broken(plan, run, shape, names) if is_asked else ():
            yield kind(f"{shape.name}: {sentence}", hint=hint)


def _broken(plan: Plan, run: RunSpec, shape: ModelShape, names: tuple[str, ...]) -> list[tuple[str, str]]:
    from weft import hardware  # numpy: only a divided model needs it
    from weft.plan.columns import columns_of
    from weft.plan.request import Request, Workload
    from weft.plan.rules import check_plan

    known = names if shape.is_exact else tuple(name for name in names if name != "vocabulary")
    request = Request(
        shape=shape,
        cluster=hardware.cluster("1xCPU"),
        workload=Workload(global_batch=run.train.global_batch, sequence_length=run.data.sequence_length),
        precision=plan.precision.policy(),
        tp_may_leave_node=True,
    )
    closed = with_mixture(plan, (0, 0)) if plan.activations.is_open else plan
    closed = with_offloaded_blocks(closed, 0) if plan.activations.has_open_blocks else closed
    return check_plan(request, columns_of([closed]), names=known)
