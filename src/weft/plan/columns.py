"""`Columns`: many plans as a table with one column per field. All formulas of the planner work on columns.

One plan is a table of one row, so explanations and searches run the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from weft.core import axes
from weft.core.float8_section import Float8Choice
from weft.core.memory_sections import Offload
from weft.core.plan import (
    V_SHAPED,
    ContextParallel,
    DataParallel,
    ExpertParallel,
    ExpertTensor,
    Pipeline,
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
