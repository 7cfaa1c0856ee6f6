"""Rows of the table of legality (`legality.py`) that ask the planner's shape of the run's model: whether it can be
divided as the plan says.

The engine asks the model itself and has the last word; a model that the planner has no shape of passes here.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.errors import WeftError
from weft.core.isolation import why_not_isolated
from weft.core.model_shape import ModelShape
from weft.core.open_choices import with_mixture, with_offloaded_blocks
from weft.core.plan import Plan
from weft.core.router_rules import with_capacity
from weft.core.run_spec import RunSpec
from weft.plan.per_run import kept_per_run

Reason = tuple[str, str]  # sentence, hint
_TENSOR = (
    *("heads", "key_value_heads", "widths", "vocabulary", "regions", "stream", "float8_blocks"),
    *("tensor_mode", "grid"),
)
_STAGES = ("stages", "blocks", "tied_updates")
_BLOCKS = ("mixture", "offloaded_blocks")


def known_shape(run: RunSpec) -> ModelShape | None:
    """The shape of the run's model; None if the planner has none: the engine then judges the model itself."""
    try:
        return _shape_of(run)
    except WeftError:
        return None


@kept_per_run
def _shape_of(run: RunSpec) -> ModelShape:
    from weft.plan.ask import resolve_model  # numpy

    return resolve_model(run)[0]


def routed_reasons(plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """[router] is of a model with experts."""
    if run is None or not with_capacity(run.router, plan).is_active:
        return
    shape = known_shape(run)
    if shape is not None and not shape.expert_layers:
        key, where = (
            ("[router]", "run.toml") if run.router.is_active else ("expert_parallel.capacity_factor", "the plan")
        )
        yield f"{key} does not apply to {shape.name}: it has no experts", f"leave {key} out of {where}"


def isolation_reasons(_plan: Plan, run: RunSpec | None) -> Iterator[Reason]:
    """The model keeps documents of a packed row apart."""
    shape = known_shape(run) if run is not None and run.data.isolates else None
    reason = why_not_isolated(shape.model_type) if shape is not None else None
    if reason is not None:
        yield reason


def tensor_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The model can be sharded over the ranks of tp."""
    return _broken(plan, run, _TENSOR) if plan.mesh.tp > 1 else []


def stage_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The model can be split into the stages of the pipeline."""
    return _broken(plan, run, _STAGES) if plan.mesh.pp > 1 else []


def block_reasons(plan: Plan, run: RunSpec | None) -> list[Reason]:
    """The model has the blocks that the plan recomputes and offloads."""
    counts_blocks = plan.activations.mixture is not None or plan.activations.offload_blocks != 0
    return _broken(plan, run, _BLOCKS) if counts_blocks else []


def _broken(plan: Plan, run: RunSpec | None, names: tuple[str, ...]) -> list[Reason]:
    """Reasons of the planner's rules with these names."""
    shape = known_shape(run) if run is not None else None
    if run is None or shape is None:
        return []
    from weft import hardware  # numpy: only a divided model needs it
    from weft.plan.plan_rows import columns_of
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
    return [
        (f"{shape.name}: {sentence}", hint) for sentence, hint in check_plan(request, columns_of([closed]), names=known)
    ]
