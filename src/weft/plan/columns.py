"""`Columns`: many plans as a table with one column per field. All formulas of the planner work on columns.

One plan is a table of one row, so explanations and searches run the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from weft.core import axes
from weft.core.errors import PlanError
from weft.core.experts import WIRE_FORMATS
from weft.core.float8_section import RECIPES, Float8Choice
from weft.core.memory_sections import Offload
from weft.core.offload_sizes import CHUNK_ELEMENTS
from weft.core.plan import (
    V_SHAPED,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    ExpertTensor,
    Pipeline,
    Plan,
    TensorParallel,
)
from weft.core.tensor_grid import tensor_depth

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SCHEDULES: tuple[str, ...] = get_args(Pipeline.model_fields["schedule"].annotation)
TP_MODES: tuple[str, ...] = get_args(TensorParallel.model_fields["mode"].annotation)
DISPATCHERS: tuple[str, ...] = get_args(ExpertParallel.model_fields["dispatcher"].annotation)
EXPERT_TENSORS: tuple[ExpertTensor, ...] = get_args(ExpertTensor)
CP_ATTENTIONS: tuple[str, ...] = get_args(ContextParallel.model_fields["attention"].annotation)
CP_SPLITS: tuple[str, ...] = get_args(ContextParallel.model_fields["split"].annotation)
ALL_REDUCES: tuple[str, ...] = get_args(DataParallel.model_fields["all_reduce"].annotation)
RECOMPUTE = ("none", "selective", "full", "budget")
FLOAT8: tuple[Float8Choice, ...] = get_args(Float8Choice)
HOMES: tuple[str, ...] = get_args(Offload.model_fields["optimizer"].annotation)
UPDATES: tuple[str, ...] = get_args(Offload.model_fields["update"].annotation)
MIXED = RECOMPUTE.index("budget")
NVME = HOMES.index("nvme")
LOOPED = ("interleaved_1f1b", "looped_bfs")  # a rank holds every pp-th stage


class PipelineKey(NamedTuple):
    """All facts besides the model that determine the stages of a pipeline's ranks."""

    schedule: str
    num_ranks: int
    virtual_stages: int
    microbatches: int
    stage_blocks: tuple[int, ...] = ()  # blocks per stage; (): by cost


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Arrays with one entry per plan."""

    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    pp: Ints
    ep: Ints
    dispatcher: Ints  # index into DISPATCHERS
    expert_tensor: Ints  # index into EXPERT_TENSORS
    wire: Ints  # index into WIRE_FORMATS
    expert_chunks: Ints
    cp_attention: Ints  # index into CP_ATTENTIONS
    cp_split: Ints  # index into CP_SPLITS
    cp_ulysses: Ints
    zero: Ints
    microbatches: Ints
    schedule: Ints  # index into SCHEDULES
    virtual_stages: Ints
    recompute: Ints  # index into RECOMPUTE
    full_blocks: Ints  # of a budget's mixture; 0 with other policies
    selective_blocks: Ints
    tp_mode: Ints  # index into TP_MODES
    sequence_parallel: Ints
    loss_parallel: Ints
    offload_activations: Ints
    offload_blocks: Ints  # further blocks whose saved tensors leave
    partition_inputs: Ints  # of recomputed blocks, over tensor-parallel ranks
    sequence_chunk: Ints  # positions that an MLP computes at a time; 0: all
    offload_optimizer: Ints  # index into HOMES
    offload_parameters: Ints
    offload_masters: Ints
    offload_update: Ints  # index into UPDATES
    staging_bytes: Ints
    chunk_elements: Ints
    delayed_update: Ints
    durable_steps: Ints
    compiled: Ints
    fused_loss: Ints
    float8: Ints  # index into FLOAT8: weights that are all-gathered in float8
    float8_linears: Ints  # index into FLOAT8: linears with float8 matmuls
    float8_recipe: Ints  # index into RECIPES
    float8_experts: Ints  # experts with float8 matmuls
    vertical_sync: Ints
    find_unused: Ints
    error_feedback: Ints
    bucket_bytes: Ints
    all_reduce: Ints  # index of ALL_REDUCES
    secondary_shard: Ints  # ranks; 0: none
    reduce_neighbours: Ints  # ranks; 0: none
    partition: Ints  # index into `partitions`
    partitions: tuple[tuple[int, ...], ...] = ((),)  # blocks per stage, given by the user; (): by cost
    registered: Mapping[str, Ints] = field(default_factory=dict)  # degrees of registered axes; absent: 1

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> Ints:
        return np.prod([self.degree(axis) for axis in axes.MESH_ORDER], axis=0)

    def degree(self, axis: str) -> Ints:
        if axis in axes.REGISTERED:
            return self.registered.get(axis, np.ones(len(self), dtype=np.int64))
        degrees: Ints = getattr(self, axis)
        return degrees

    @property
    def shards(self) -> Ints:
        """Ranks that share one copy of the states, including context-parallel ranks, which have the same weights."""
        return np.where(self.zero > 0, self.dp_shard * self.cp, 1)

    @property
    def reducing(self) -> Ints:
        """Ranks among which gradients are reduced: shards, or replicas without them."""
        return np.where(self.zero > 0, self.dp_shard, self.dp_replicate) * self.cp

    @property
    def backward_shards(self) -> Ints:
        """Ranks that ZeRO-3's backward gathers weights from."""
        return np.where(self.secondary_shard > 0, self.secondary_shard, self.shards)

    @property
    def head_ranks(self) -> Ints:
        """Context-parallel neighbours that exchange heads (`ContextParallel.head_ranks`)."""
        has_all = self.cp_attention == CP_ATTENTIONS.index("ulysses")
        return np.where(has_all, self.cp, np.minimum(self.cp_ulysses, self.cp))

    @property
    def key_ranks(self) -> Ints:
        """Context-parallel ranks between which keys and values travel: one of each group of neighbours."""
        return self.cp // self.head_ranks

    @property
    def cp_multiple(self) -> Ints:
        """Rows are padded to a multiple of this length (`core/sequence_split.py`)."""
        pieces = np.where(self.cp_split == CP_SPLITS.index("zigzag"), 2, 1)
        is_sliced = (self.sequence_parallel > 0) & (self.tp_mode == TP_MODES.index("1d"))
        unit = np.lcm(self.cp * pieces, self.cp * np.where(is_sliced, self.tp, 1))
        return np.where(self.cp > 1, unit, 1)

    @cached_property
    def expert_pool(self) -> Ints:
        """Ranks of the axes that expert parallelism divides."""
        pools = [
            np.prod([self.degree(axis) for axis in ExpertParallel(tensor=tensor).axis_names], axis=0)
            for tensor in EXPERT_TENSORS
        ]
        return np.asarray(np.choose(self.expert_tensor, pools), dtype=np.int64)

    @property
    def folds_experts(self) -> Bools:
        """Plans whose tensor ranks hold full experts."""
        return (self.ep > 1) & (self.tp > 1) & (self.expert_tensor == EXPERT_TENSORS.index("folded"))

    @property
    def expert_tp(self) -> Ints:
        """Ranks that shard one expert: those of the tensor axis, unless they hold full experts."""
        return np.where(self.folds_experts, 1, self.tp)

    @property
    def edp(self) -> Ints:
        """Ranks that hold the same experts, or the same shards of them."""
        return np.where(self.ep > 1, np.maximum(1, self.expert_pool // self.ep), self.dp_shard * self.cp)

    @property
    def expert_shards(self) -> Ints:
        """Ranks that share one copy of an expert's states."""
        return np.where(self.zero > 0, self.edp, 1)

    def named(self, schedule: str) -> Bools:
        return self.schedule == SCHEDULES.index(schedule)

    @property
    def updates(self) -> Ints:
        """Weight updates per step: PipeDream updates after every micro-batch."""
        return np.where(self.named("pipedream") & (self.pp > 1), self.microbatches, 1)

    def recomputes(self, policy: str) -> Bools:
        return self.recompute == RECOMPUTE.index(policy)

    @cached_property
    def pipelines(self) -> tuple[list[PipelineKey], Ints]:
        """The distinct pipelines, and the index of each plan's."""
        parts = (self.schedule, self.pp, self.virtual_stages, self.microbatches)
        packed = np.zeros(len(self), dtype=np.int64)
        for part, bits in zip(parts, (5, 14, 10, 34), strict=True):  # sorting one integer is ten times faster than four
            packed = (packed << bits) + part
        by_hand = bool(np.any(self.partition))
        keys = np.stack([packed, self.partition], axis=1) if by_hand else packed
        _, first, inverse = np.unique(keys, axis=0 if by_hand else None, return_index=True, return_inverse=True)
        rows = np.stack([part[first] for part in (*parts, self.partition)], axis=1).tolist()
        return [PipelineKey(SCHEDULES[s], p, v, m, self.partitions[d]) for s, p, v, m, d in rows], inverse.reshape(-1)

    @cached_property
    def tensor_depth(self) -> Ints:
        """d of 2.5D's d layers of q x q; 1 in other modes, and if no such grid exists."""
        degrees = np.unique(self.tp)
        depths = np.asarray([tensor_depth(int(tp)) or 1 for tp in degrees], dtype=np.int64)
        layered = self.tp_mode == TP_MODES.index("2.5d")
        return np.where(layered, depths[np.searchsorted(degrees, self.tp)], 1)

    @property
    def is_grid(self) -> Bools:
        return (self.tp > 1) & (self.tp_mode != TP_MODES.index("1d"))

    @property
    def is_cube(self) -> Bools:
        return self.tp_mode == TP_MODES.index("3d")

    @cached_property
    def tensor_side(self) -> Floats:
        """q of the grids; 1 for 1d, and if no such grid exists."""
        side = np.round(np.where(self.is_cube, np.cbrt(self.tp), np.sqrt(self.tp / self.tensor_depth)))
        ranks = side**2 * np.where(self.is_cube, side, self.tensor_depth)
        return np.where(self.is_grid & (ranks == self.tp), side, 1.0)

    @cached_property
    def matrix_divisor(self) -> Floats:
        """Tensor ranks that shard a matrix; in 2.5D each layer holds a full copy."""
        return np.asarray(self.tp / self.tensor_depth, dtype=np.float64)

    @property
    def is_v_shaped(self) -> Bools:
        return np.isin(self.schedule, [SCHEDULES.index(name) for name in V_SHAPED])

    def take(self, rows: Any) -> Columns:
        """The plans in these rows."""
        taken = {name: getattr(self, name)[rows] for name in array_names()}
        registered = {axis: degrees[rows] for axis, degrees in self.registered.items()}
        return Columns(**taken, partitions=self.partitions, registered=registered)


def array_names() -> list[str]:
    """The fields with one entry per plan."""
    return [one.name for one in fields(Columns) if one.name not in ("partitions", "registered")]


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
