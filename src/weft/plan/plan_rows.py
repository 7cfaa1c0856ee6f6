"""Plans as rows of `Columns`, and back: every key of plan.toml that the planner reads has its column here.

plan_at(columns_of(plans), row, precision=...) == plans[row]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from weft.core import axes
from weft.core.errors import PlanError
from weft.core.experts import WIRE_FORMATS
from weft.core.float8_section import RECIPES, Float8Choice
from weft.core.offload_sizes import CHUNK_ELEMENTS
from weft.core.plan import Pipeline, Plan
from weft.plan.columns import (
    ALL_REDUCES,
    CP_ATTENTIONS,
    CP_SPLITS,
    DISPATCHERS,
    EXPERT_TENSORS,
    FLOAT8,
    HOMES,
    MIXED,
    RECOMPUTE,
    SCHEDULES,
    TP_MODES,
    UPDATES,
    Columns,
    Ints,
)


def columns_of(plans: Sequence[Plan]) -> Columns:
    """Plans as columns. A budget needs its mixture (see memory/budget.py)."""

    def column(values: Iterable[int]) -> Ints:
        return np.fromiter(values, dtype=np.int64, count=len(plans))

    mixtures = [_mixture(plan) for plan in plans]
    partitions = tuple(dict.fromkeys([(), *(plan.pipeline.blocks or () for plan in plans)]))
    return Columns(
        dp_replicate=column(plan.mesh.dp_replicate for plan in plans),
        dp_shard=column(plan.mesh.dp_shard for plan in plans),
        cp=column(plan.mesh.cp for plan in plans),
        tp=column(plan.mesh.tp for plan in plans),
        pp=column(plan.mesh.pp for plan in plans),
        ep=column(plan.mesh.ep for plan in plans),
        dispatcher=column(DISPATCHERS.index(plan.expert_parallel.dispatcher) for plan in plans),
        expert_tensor=column(EXPERT_TENSORS.index(plan.expert_parallel.tensor) for plan in plans),
        wire=column(WIRE_FORMATS.index(plan.expert_parallel.wire) for plan in plans),
        expert_chunks=column(plan.expert_parallel.chunks for plan in plans),
        cp_attention=column(CP_ATTENTIONS.index(plan.context_parallel.attention) for plan in plans),
        cp_split=column(CP_SPLITS.index(plan.context_parallel.split) for plan in plans),
        cp_ulysses=column(plan.context_parallel.ulysses for plan in plans),
        zero=column(plan.data_parallel.zero for plan in plans),
        microbatches=column(plan.pipeline.microbatches for plan in plans),
        schedule=column(_schedule(plan) for plan in plans),
        virtual_stages=column(plan.pipeline.virtual_stages for plan in plans),
        recompute=column(RECOMPUTE.index(plan.activations.policy) for plan in plans),
        full_blocks=column(full for full, _ in mixtures),
        selective_blocks=column(selective for _, selective in mixtures),
        tp_mode=column(TP_MODES.index(plan.tensor_parallel.mode) for plan in plans),
        sequence_parallel=column(int(plan.tensor_parallel.sequence_parallel) for plan in plans),
        loss_parallel=column(int(plan.tensor_parallel.loss_parallel) for plan in plans),
        offload_activations=column(int(plan.activations.offload != "none") for plan in plans),
        offload_blocks=column(_blocks_away(plan) for plan in plans),
        partition_inputs=column(int(plan.activations.partition) for plan in plans),
        sequence_chunk=column(plan.activations.sequence_chunk for plan in plans),
        offload_optimizer=column(HOMES.index(plan.offload.optimizer) for plan in plans),
        offload_parameters=column(int(plan.offload.parameters != "none") for plan in plans),
        offload_masters=column(int(plan.offload.masters == "host") for plan in plans),
        offload_update=column(UPDATES.index(plan.offload.update) for plan in plans),
        staging_bytes=column(plan.offload.staging_bytes for plan in plans),
        chunk_elements=column(plan.offload.chunk_elements or CHUNK_ELEMENTS for plan in plans),
        delayed_update=column(int(plan.offload.delayed) for plan in plans),
        durable_steps=column(int(plan.offload.durable == "step") for plan in plans),
        compiled=column(int(plan.compile.enabled) for plan in plans),
        fused_loss=column(int(plan.kernels.loss == "fused") for plan in plans),
        float8=column(FLOAT8.index(_in_float8(plan)) for plan in plans),
        float8_linears=column(FLOAT8.index(plan.float8.linears) for plan in plans),
        float8_recipe=column(RECIPES.index(plan.float8.recipe) for plan in plans),
        float8_experts=column(int(plan.float8.experts == "all") for plan in plans),
        vertical_sync=column(int(plan.pipeline.vertical_sync) for plan in plans),
        find_unused=column(int(plan.data_parallel.find_unused_parameters) for plan in plans),
        error_feedback=column(int(plan.data_parallel.error_feedback) for plan in plans),
        bucket_bytes=column(plan.data_parallel.bucket_bytes for plan in plans),
        all_reduce=column(ALL_REDUCES.index(plan.data_parallel.all_reduce) for plan in plans),
        secondary_shard=column(plan.data_parallel.secondary_shard for plan in plans),
        reduce_neighbours=column(plan.data_parallel.reduce_neighbours for plan in plans),
        partition=column(partitions.index(plan.pipeline.blocks or ()) for plan in plans),
        partitions=partitions,
        registered={axis: column(plan.mesh.sizes()[axis] for plan in plans) for axis in axes.REGISTERED},
    )


def _in_float8(plan: Plan) -> Float8Choice:
    return plan.float8.linears if plan.float8.gather == "float8" else "none"


def plan_at(columns: Columns, row: int, *, precision: dict[str, Any]) -> Plan:
    """The plan in one row; `precision` is the table of that section."""

    def at(name: str) -> int:
        return int(getattr(columns, name)[row])

    tables = {
        "mesh": {axis: int(columns.degree(axis)[row]) for axis in (*axes.MESH_ORDER, axes.EP)},
        "data_parallel": {
            "zero": at("zero"),
            "bucket_bytes": at("bucket_bytes"),
            "all_reduce": ALL_REDUCES[at("all_reduce")],
            "secondary_shard": at("secondary_shard"),
            "reduce_neighbours": at("reduce_neighbours"),
            "find_unused_parameters": bool(at("find_unused")),
            "error_feedback": bool(at("error_feedback")),
        },
        "tensor_parallel": {
            "mode": TP_MODES[at("tp_mode")],
            "sequence_parallel": bool(at("sequence_parallel")),
            "loss_parallel": bool(at("loss_parallel")),
        },
        "expert_parallel": {
            "dispatcher": DISPATCHERS[at("dispatcher")],
            "tensor": EXPERT_TENSORS[at("expert_tensor")],
            "wire": WIRE_FORMATS[at("wire")],
            "chunks": at("expert_chunks"),
        },
        "context_parallel": {
            "attention": CP_ATTENTIONS[at("cp_attention")],
            "split": CP_SPLITS[at("cp_split")],
            "ulysses": at("cp_ulysses"),
        },
        "pipeline": {
            "schedule": SCHEDULES[at("schedule")],
            "microbatches": at("microbatches"),
            "virtual_stages": at("virtual_stages"),
            "vertical_sync": bool(at("vertical_sync")),
            "blocks": columns.partitions[at("partition")],
        },
        "precision": precision,
        "activations": {
            "policy": RECOMPUTE[at("recompute")],
            "mixture": (at("full_blocks"), at("selective_blocks")) if at("recompute") == MIXED else (),
            "offload": "cpu" if at("offload_activations") else "none",
            "offload_blocks": at("offload_blocks"),
            "partition": bool(at("partition_inputs")),
            "sequence_chunk": at("sequence_chunk"),
        },
        "offload": {
            "optimizer": HOMES[at("offload_optimizer")],
            "parameters": "cpu" if at("offload_parameters") else "none",
            "masters": "host" if at("offload_masters") else "device",
            "update": UPDATES[at("offload_update")],
            "staging_bytes": at("staging_bytes"),
            **({"chunk_elements": at("chunk_elements")} if at("chunk_elements") != CHUNK_ELEMENTS else {}),
            "delayed": bool(at("delayed_update")),
            "durable": "step" if at("durable_steps") else "checkpoint",
        },
        "compile": {"enabled": bool(at("compiled"))},
        "kernels": {"loss": "fused" if at("fused_loss") else "whole"},
        "float8": {
            "linears": FLOAT8[at("float8_linears")],
            **({"gather": "weights"} if at("float8_linears") != at("float8") else {}),
            "recipe": RECIPES[at("float8_recipe")],
            "experts": "all" if at("float8_experts") else "none",
        },
    }
    return Plan.from_tables(tables, source="the planner")


def _mixture(plan: Plan) -> tuple[int, int]:
    if plan.activations.is_open:
        raise PlanError(
            "activations.policy = 'budget' has no activations.mixture, so its memory cannot be estimated",
            hint="set activations.mixture = [full, selective], or name the devices to have it chosen",
        )
    return plan.activations.mixture or (0, 0)


def _schedule(plan: Plan) -> int:
    """Without a pipeline there is one schedule, whatever the plan names: the default."""
    pipeline = plan.pipeline if plan.mesh.pp > 1 else Pipeline()
    return SCHEDULES.index(pipeline.schedule)


def _blocks_away(plan: Plan) -> int:
    number = plan.activations.offload_blocks
    if number == "auto":
        raise PlanError(
            "activations.offload_blocks = 'auto' is not chosen yet, so its memory cannot be estimated",
            hint="set a number of blocks, or name the devices to have it chosen",
        )
    return number
