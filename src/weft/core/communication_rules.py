"""Collectives of data parallelism that this version's engine does not execute: chosen algorithms, codes, error
feedback, secondary shards. Each as (whether the plan has it, sentence part); `executable` says the rest.
"""

from __future__ import annotations

from weft.core.plan import Plan
from weft.core.wire_bytes import CODED


def not_communicated(plan: Plan) -> list[tuple[bool, str]]:
    return [*_not_summed(plan), *_not_coded(plan), *_not_secondary(plan)]


def _not_summed(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose gradients are summed by torch alone."""
    dp, mesh = plan.data_parallel, plan.mesh
    is_chosen, what = dp.all_reduce != "auto", f"data_parallel.all_reduce = {dp.all_reduce!r}"
    is_sharded = dp.zero > 0 and mesh.dp_replicate == 1
    return [
        (
            is_chosen and is_sharded,
            f"{what} with sharded gradients (data_parallel.zero > 0), which no rank all-reduces",
        ),
        (
            is_chosen and dp.zero > 0 and mesh.dp_replicate > 1 and mesh.pp == 1,
            f"{what} with HSDP outside of a pipeline, where fully_shard sums over the replicas",
        ),
        (is_chosen and plan.data_parallel.is_threaded, f"{what} with dataparallel"),
    ]


def _not_coded(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose gradients do not travel as codes."""
    policy, dp = plan.precision.policy(), plan.data_parallel
    is_on, what = policy.has_coded_sums, f"precision.reduce = {policy.reduce!r}"
    is_grid = plan.mesh.tp > 1 and plan.tensor_parallel.mode != "1d"
    grid = f"tensor_parallel.mode = {plan.tensor_parallel.mode!r}"
    return [
        (is_on and plan.data_parallel.is_threaded, f"{what} with dataparallel, which has no ranks"),
        (is_on and dp.all_reduce != "auto", f"{what} with data_parallel.all_reduce: codes travel as an all-to-all"),
        (is_on and plan.has_delayed_updates, f"{what} with {plan.delayed_by}"),
        (policy.reduce in CODED and is_grid, f"{what} with {grid}: scales differ between copies of a parameter"),
        (is_on and dp.find_unused_parameters, f"{what} with data_parallel.find_unused_parameters"),
        (
            is_on and plan.mesh.ep > 1 and dp.zero == 0,
            f"{what} with replicated experts (mesh.ep > 1, data_parallel.zero = 0), whose gradients are summed one by "
            "one",
        ),
        (
            dp.reduce_neighbours > 0 and plan.mesh.ep > 1,
            "data_parallel.reduce_neighbours with expert parallelism (mesh.ep > 1), whose experts other ranks reduce",
        ),
        *(
            (dp.error_feedback and has, f"data_parallel.error_feedback with {name}")
            for has, name in (
                (is_grid, grid),
                (
                    plan.mesh.pp > 1 and dp.zero > 1 and plan.pipeline.is_v_shaped,
                    f"data_parallel.zero = {dp.zero} and pipeline.schedule = {plan.pipeline.schedule!r}, whose first "
                    "rank reduces the parts of a unit one by one",
                ),
                (policy.loss_scaling, "a loss scale (precision fp16), which changes from step to step"),
                (plan.offload.optimizer == "nvme", "states in files (offload.optimizer = 'nvme')"),
            )
        ),
        *(
            (bool(plan.coded_gather) and has, f"precision.gather = {policy.gather!r} with {name}")
            for has, name in (
                (plan.offload.parameters != "none", "parameter offload (offload.parameters)"),
                (plan.has_delayed_updates, plan.delayed_by),
                (is_grid, f"{grid}: scales differ between copies of a parameter, which would no longer be equal"),
            )
        ),
    ]


def _not_secondary(plan: Plan) -> list[tuple[bool, str]]:
    """Layouts whose units are gathered in another order than forward, backward, or change in between."""
    size = plan.data_parallel.secondary_shard
    return [
        (size > 0 and has, f"data_parallel.secondary_shard = {size} with {what}")
        for has, what in (
            (plan.mesh.pp > 1, "a pipeline (mesh.pp > 1)"),
            (plan.mesh.ep > 1, "expert parallelism (mesh.ep > 1)"),
            (plan.offload.parameters != "none", "parameter offload (offload.parameters)"),
            (plan.has_delayed_updates, plan.delayed_by),
        )
    ]
