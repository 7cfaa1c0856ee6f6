"""One resolution of a plan, before ranks start: defaults, choices by device, legality, the recompute mixture.

Every verb that trains, measures or verifies calls `resolve`. Its result is a plan without open choices, a value: ranks,
engine and dry run take it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.core import axes
from weft.core.errors import MeshError, ModelError, PlanError, WeftError
from weft.core.executable import why_not_compiled, why_not_fused
from weft.core.open_choices import (
    UpdatePlace,
    has_open_update,
    with_dispatcher,
    with_mixture,
    with_offloaded_blocks,
    with_update,
)
from weft.core.plan import Compile, Plan
from weft.core.run_spec import RunSpec
from weft.plan.legality import is_legal, require_legal
from weft.plan.model_rules import known_shape
from weft.plan.other_ranks import usable_ranks, with_data_parallel_ranks

Tables = dict[str, Any]


def resolve(
    tables: Tables,
    run: RunSpec,
    *,
    on_gpu: bool,
    num_ranks: int | None = None,
    devices: Callable[[int], str] | None = None,
    machine: Callable[[int], str] | None = None,
    source: str = "the plan",
    has_own_model: bool = False,
) -> Plan:
    """The legal plan of `tables` for `run`.

    `num_ranks`: the ranks that will run, if known; a plan without a mesh gets one of data parallelism. `devices` names
    so many devices in the notation of `hardware`, for whose memory the recompute mixture of a budget is chosen; without
    it the mixture stays open. `machine` names them for choices that need no memory: the place of an offloaded update;
    default: `devices`, and without both the kind of device decides. `has_own_model`: a caller's own trains, which is
    unknown to the planner: no rule and no choice reads run.model.
    """
    tables = with_whole_loss(tables) if run.objective.reads_logits else tables
    has_codes = run.adapter.is_quantised
    plan = with_choices(with_mesh(tables, num_ranks=num_ranks), on_gpu=on_gpu, source=source, has_codes=has_codes)
    if num_ranks is not None and plan.num_ranks != num_ranks and plan.data_parallel.elastic:
        plan = with_data_parallel_ranks(plan, run, num_ranks, has_own_model=has_own_model)
    if num_ranks is not None and plan.num_ranks != num_ranks:
        sizes = {axis: size for axis, size in plan.mesh.sizes().items() if size > 1}
        raise MeshError(
            f"{source}: the mesh has {plan.num_ranks} ranks ({sizes or 'all axes 1'}) but {num_ranks} were asked for",
            hint=f"use --nproc {plan.num_ranks}, change [mesh] so that its product is {num_ranks}, or set"
            " data_parallel.elastic = true",
        )
    require_legal(plan, run, has_own_model=has_own_model)
    if not has_own_model:
        plan = with_dispatcher_for(run, plan)
    if has_open_update(plan):
        plan = with_update_for(None if has_own_model else machine or devices, run, plan, on_gpu=on_gpu)
        require_legal(plan, run, has_own_model=has_own_model)  # keys that the chosen place does not execute
    return plan if devices is None else with_mixture_for(devices, run, plan, has_own_model=has_own_model)


def with_mesh(tables: Tables, *, num_ranks: int | None) -> Tables:
    """`tables` with a mesh for `num_ranks` if none is given: dp_replicate for zero = 0, dp_shard otherwise."""
    if "mesh" in tables or num_ranks in (None, 1):
        return tables
    dp = tables.get("data_parallel", {})
    zero = dp.get("zero", 0) if isinstance(dp, dict) else 0  # the parser refuses anything else by name
    return {**tables, "mesh": {axes.DP_SHARD if zero else axes.DP_REPLICATE: num_ranks}}


def most_ranks(tables: Tables, run: RunSpec, limit: int) -> int:
    """The largest number of ranks up to `limit` on which the plan runs; 0: it has a mesh and is not elastic, or no
    number is legal."""
    if "mesh" in tables:
        plan = with_choices(tables, on_gpu=False)
        if plan.data_parallel.elastic:
            return usable_ranks(plan, run, limit)
        return plan.num_ranks if plan.num_ranks <= limit else 0
    counts = range(limit, 0, -1)
    plans = ((count, with_choices(with_mesh(tables, num_ranks=count), on_gpu=False)) for count in counts)
    return next((count for count, plan in plans if is_legal(plan, run)), 0)


def with_choices(tables: Tables, *, on_gpu: bool, source: str = "the plan", has_codes: bool = False) -> Plan:
    """The plan of `tables` with the choices that depend on the kind of device: a GPU computes in bf16, compiles blocks
    and fuses head and loss wherever weft supports it. Given keys stay; a CPU uses the plan's own defaults.

    `compile.enabled = false` turns the fast path off: the loss is then not fused unless `kernels.loss` is given.
    `has_codes`: frozen weights of an adapter rest in codes, beside which blocks are not compiled.
    """
    if not on_gpu:
        return Plan.from_tables(tables, source=source)
    plan = Plan.from_tables(_in_bf16(tables), source=source)
    compiled, kernels = tables.get("compile", {}), tables.get("kernels", {})
    if "enabled" not in compiled:
        plan = plan.model_copy(update={"compile": Compile(enabled=not has_codes and not why_not_compiled(plan))})
    if "loss" not in kernels and compiled.get("enabled", True) and not why_not_fused(plan):
        plan = plan.model_copy(update={"kernels": plan.kernels.model_copy(update={"loss": "fused"})})
    return plan


def with_whole_loss(tables: Tables) -> Tables:
    """`tables` with logits in full unless they ask for a fused loss: the objective reads them."""
    kernels = tables.get("kernels", {})
    if not isinstance(kernels, dict) or "loss" in kernels:
        return tables
    return {**tables, "kernels": {**kernels, "loss": "whole"}}


def _in_bf16(tables: Tables) -> Tables:
    precision, dp = tables.get("precision", {}), tables.get("data_parallel", {})
    if not (isinstance(precision, dict) and isinstance(dp, dict)):
        return tables  # the parser refuses it by name
    if "preset" in precision or dp.get("strategy") == "dataparallel":
        return tables
    return {**tables, "precision": {**precision, "preset": "bf16"}}


def with_dispatcher_for(run: RunSpec, plan: Plan) -> Plan:
    """The plan with the dispatcher chosen for the run's model; open if the planner has no shape of it."""
    if not plan.has_open_dispatcher or (shape := known_shape(run)) is None:
        return plan
    return with_dispatcher(plan, shape.expert_layers)


def with_update_for(devices: Callable[[int], str] | None, run: RunSpec, plan: Plan, *, on_gpu: bool) -> Plan:
    """The plan with the place where its offloaded states are updated; any other plan as it is.

    The faster place on `devices`; if they or the model are unknown to the planner, the device on a GPU, else the host.
    """
    if not has_open_update(plan):
        return plan
    place: UpdatePlace = "device" if on_gpu else "host"
    if devices is not None and on_gpu:
        from weft.plan.ask import ask  # numpy: only an offloaded update needs it
        from weft.plan.offload import choose_update

        try:
            question = ask(run, devices(plan.num_ranks), precision=plan.precision.model_dump(exclude_none=True))
            closed = with_mixture(plan, (0, 0)) if plan.activations.is_open else plan
            place = choose_update(question.request, with_offloaded_blocks(closed, 0))
        except WeftError:
            pass  # no entry in the catalogue: the plan trains all the same
    return with_update(plan, place)


def with_mixture_for(devices: Callable[[int], str], run: RunSpec, plan: Plan, *, has_own_model: bool = False) -> Plan:
    """The plan with its budget's recompute mixture and its offloaded blocks chosen for `devices`."""
    if not plan.activations.is_open and not plan.activations.has_open_blocks:
        return plan
    from weft.plan.ask import ask  # numpy: only a budget needs it
    from weft.plan.memory.budget import with_chosen_mixture
    from weft.plan.offloaded_blocks import with_chosen_blocks

    named = devices(plan.num_ranks)
    try:
        if has_own_model:
            raise ModelError("the planner has no shape of a model of your own")
        question = ask(run, named, precision=plan.precision.model_dump(exclude_none=True))
    except WeftError as error:
        what = "recompute mixture of a budget" if plan.activations.is_open else "number of offloaded blocks"
        raise PlanError(
            f"cannot choose the {what}: {error.message}",
            hint="set it: activations.mixture = [full, selective], activations.offload_blocks = number",
        ) from error
    request = replace(question.request, tp_may_leave_node=True)
    return with_chosen_blocks(request, with_chosen_mixture(request, plan))
