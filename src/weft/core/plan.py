"""`Plan`: the layout of one model over many devices. A frozen value with a printed form (plan.toml) that parses back.

Model and training are in run_spec. No torch: planner, engine and report share it.
Ranks = dp_replicate x dp_shard x cp x tp x pp, and any axis that was registered.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, create_model, field_validator, model_validator

from weft.core import axes
from weft.core.config import Document, Section, sections_of
from weft.core.experts import WireFormat
from weft.core.float8_section import GATHERED, Float8
from weft.core.memory_sections import Activations, Offload
from weft.core.plan_checks import require_consistent
from weft.core.precision import E2M1, E4M3, LOW_PRODUCTS, LOW_STATES, Format, PrecisionPolicy
from weft.core.precision_presets import PRESETS
from weft.core.precision_section import Precision
from weft.core.sequence_split import SequenceSplit
from weft.core.wire_bytes import CODED

SPLIT = ("zero_bubble", "zbv", "dualpipev")  # schedules that split the backward
V_SHAPED = ("zbv", "dualpipev")  # a rank holds one stage per leg of the V: rank 0 holds the first and the last
BUCKET_BYTES = 25 * 2**20  # DDP's own size
Degree = Field(default=1, ge=1, description="ranks of the axis, at least 1")


if TYPE_CHECKING:
    _RegisteredDegrees = Section
else:
    _RegisteredDegrees = create_model(
        "_RegisteredDegrees", __base__=Section, **dict.fromkeys(axes.REGISTERED, (int, Degree))
    )


class Mesh(_RegisteredDegrees):
    """Degrees of the axes; the product of all but `ep` is the number of ranks."""

    dp_replicate: int = Degree
    dp_shard: int = Degree
    cp: int = Degree
    tp: int = Degree
    pp: int = Degree
    ep: int = Degree

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes().values())

    @property
    def dp_degree(self) -> int:
        """Number of ranks with different data."""
        return self.dp_replicate * self.dp_shard

    def sizes(self) -> dict[str, int]:
        """Axis name to degree, in mesh order, outermost first."""
        return {axis: getattr(self, axis) for axis in axes.MESH_ORDER}


class DataParallel(Section):
    """zero: 0 replicates (DDP), 1 shards optimizer states, 2 also gradients, 3 also parameters (FSDP)."""

    zero: Literal[0, 1, 2, 3] = Field(default=0, description="0 (DDP) | 1 | 2 (shard-grad-op) | 3 (FSDP, full shard)")
    strategy: Literal["auto", "dataparallel"] = Field(
        default="auto", description="auto | dataparallel (legacy nn.DataParallel: one process, several GPUs)"
    )
    bucket_bytes: int = Field(
        default=BUCKET_BYTES,
        ge=2**10,
        description="gradients per all-reduce, in bytes: DDP's buckets, and those of replicas of a pipeline",
    )
    all_reduce: Literal["auto", "ring", "star", "naive", "tree", "halving", "hierarchical"] = Field(
        default="auto",
        description="how gradients of replicas are summed: auto (the backend's choice) | ring | star (through one "
        "rank) | naive (everything to everyone) | tree | halving (recursive halving-doubling) | hierarchical (by node)",
    )
    secondary_shard: int = Field(
        default=0,
        ge=0,
        description="zero = 3: adjacent ranks (of a node) that keep the weights of a forward sharded among them; the "
        "backward gathers there (hpZ). 0: over all shards",
    )
    reduce_neighbours: int = Field(
        default=0,
        ge=0,
        description="with precision.reduce in a lower format: adjacent ranks (of a node) that sum gradients first, and "
        "send codes of their sums to other nodes (qgZ). 0: codes of all ranks go to all",
    )
    elastic: bool = Field(
        default=False,
        description="on another number of ranks than the mesh has, the data-parallel degrees change: as many "
        "micro-batches as keep the global batch and the size of a micro-batch",
    )
    error_feedback: bool = Field(
        default=False,
        description="with precision.reduce in a lower format: every rank adds what its codes of gradients lost to the "
        "gradients it sends next",
    )
    find_unused_parameters: bool = Field(
        default=False, description="true if some parameters are unused in some steps (DDP only, costs a pass)"
    )

    @property
    def is_threaded(self) -> bool:
        """Replicas are threads of one process (torch's DataParallel)."""
        return self.strategy == "dataparallel"


class TensorParallel(Section):
    mode: Literal["1d", "2d", "2.5d", "3d"] = Field(
        default="1d", description="how matrices are sharded: 1d | 2d | 2.5d | 3d"
    )
    sequence_parallel: bool = Field(default=True, description="norms and dropout work on a shard of the sequence")
    loss_parallel: bool = Field(default=True, description="the loss is computed on a shard of the vocabulary")


ExpertTensor = Literal["folded", "width"]


class ExpertParallel(Section):
    dispatcher: Literal["auto", "pairs", "tokens", "gather"] = Field(
        default="auto",
        description="how tokens reach the ranks of their experts: pairs (one row per expert) | tokens (one row per "
        "rank) | gather (all rows to all ranks) | auto (gather if it sends at most 1.15 x the rows of tokens)",
    )
    tensor: ExpertTensor = Field(
        default="folded",
        description="tensor-parallel ranks and experts: folded (they hold further experts: ep divides dp_shard x cp x "
        "tp) | width (they shard each expert's width: ep divides dp_shard x cp)",
    )
    wire: WireFormat = Field(
        default="activations",
        description="format in which tokens travel to their experts: activations (as computed) | float8 (e4m3, a scale "
        "per 128 elements); outputs and gradients travel as computed",
    )
    chunks: int = Field(
        default=1,
        ge=1,
        description="parts of a micro-batch's tokens; one travels while the experts compute another",
    )
    capacity_factor: float = Field(
        default=0.0, ge=0, description="router.capacity_factor of run.toml, for this plan; 0: as run.toml has it"
    )

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The axes whose ranks expert parallelism takes."""
        return (axes.DP_SHARD, axes.CP, axes.TP) if self.tensor == "folded" else (axes.DP_SHARD, axes.CP)


class ContextParallel(Section):
    """How attention sees the keys and values of other ranks of `mesh.cp`."""

    attention: Literal["gather", "ulysses", "ring"] = Field(
        default="gather",
        description="gather (keys and values of all ranks, any mask) | ulysses (all positions of a share of the "
        "heads) | ring (keys and values pass from rank to rank beside attention; no soft caps)",
    )
    split: SequenceSplit = Field(
        default="zigzag",
        description="positions of a rank: zigzag (an early and a late piece: equal causal work) | contiguous",
    )
    ulysses: int = Field(
        default=1,
        ge=1,
        description="gather, ring: neighbouring ranks that exchange heads first, as within a node; keys and values "
        "travel between such groups. Divides mesh.cp and, with tp, the heads",
    )

    def head_ranks(self, cp: int) -> int:
        """Neighbouring ranks that exchange heads: each then has the positions of all for a share of the heads."""
        return cp if self.attention == "ulysses" else min(self.ulysses, cp)


class Pipeline(Section):
    schedule: Literal[
        "naive",
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "zero_bubble",
        "zbv",
        "dualpipev",
        "pipedream",
        "pipedream_2bw",
    ] = Field(default="1f1b", description="the order of forwards and backwards over the stages")
    microbatches: int = Field(
        default=1,
        ge=1,
        description="micro-batches per step on each rank: gradient accumulation without pp, pipelining with pp",
    )
    virtual_stages: int = Field(default=1, ge=1, description="stages per pipeline rank, at least 1")
    vertical_sync: bool = Field(
        default=False, description="pipedream: a micro-batch reads the same version of the weights on every stage"
    )
    blocks: tuple[int, ...] | None = Field(
        default=None,
        description="blocks of each of the pp x virtual_stages stages, as [5, 5, 5, 1]; absent or []: balanced by cost",
    )

    @field_validator("blocks", mode="before")
    @classmethod
    def _blocks_are_counts(cls, blocks: Any) -> Any:
        """Check the list as one value: an error about a single number would lack the key's description."""
        if not isinstance(blocks, list | tuple):
            return blocks
        if any(type(number) is not int or number < 1 for number in blocks):
            raise ValueError("every stage has an integer number of blocks, at least 1")
        return tuple(blocks) or None

    @property
    def never_drains(self) -> bool:
        """Whether updates are made while later micro-batches are in flight: other mathematics, on purpose."""
        return self.schedule in ("pipedream", "pipedream_2bw")

    @property
    def is_v_shaped(self) -> bool:
        """Whether the first rank has the first and the last stage."""
        return self.schedule in V_SHAPED

    @property
    def splits_backwards(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return self.schedule in SPLIT


class Compile(Section):
    enabled: bool = Field(
        default=False, description="torch.compile of the blocks; absent on a GPU: true wherever weft supports it"
    )


class Kernels(Section):
    """Implementations of the same computation that differ in speed and memory."""

    loss: Literal["whole", "fused"] = Field(
        default="whole",
        description="whole (logits as one tensor) | fused (head and loss together, logits in chunks); absent on a "
        "GPU: fused, unless compile.enabled = false",
    )
    attention: Literal["auto", "torch"] = Field(
        default="auto",
        description="fused attention on a GPU: auto (the fastest kernel at the run's shape, timed once) | torch (its "
        "own choice)",
    )
    gradient_copy: Literal["own", "torch"] = Field(
        default="own",
        description="copy of gradients into a reduce-scatter, on a GPU: own (at memory bandwidth) | torch",
    )


class Plan(Document):
    """The complete layout."""

    version: Literal[1] = Field(default=1, description="version of this file format")
    mesh: Mesh = Mesh()
    data_parallel: DataParallel = DataParallel()
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    context_parallel: ContextParallel = ContextParallel()
    pipeline: Pipeline = Pipeline()
    precision: Precision = Precision()
    activations: Activations = Activations()
    offload: Offload = Offload()
    compile: Compile = Compile()
    kernels: Kernels = Kernels()
    float8: Float8 = Float8()

    @model_validator(mode="before")
    @classmethod
    def _zero_follows_the_mesh(cls, tables: Any) -> Any:
        """A sharding mesh without a ZeRO stage means ZeRO-3; a given stage never changes."""
        if not isinstance(tables, dict):
            return tables
        mesh, dp = tables.get("mesh"), tables.get("data_parallel", {})
        if not isinstance(mesh, dict) or not isinstance(dp, dict):
            return tables
        if "zero" not in dp and isinstance(mesh.get("dp_shard"), int) and mesh["dp_shard"] > 1:
            return {**tables, "data_parallel": {**dp, "zero": 3}}
        return tables

    @classmethod
    def from_tables(cls, tables: dict[str, Any], *, source: str = "plan") -> Self:
        plan = super().from_tables(tables, source=source)
        require_consistent(plan, source=source)
        return plan

    @model_validator(mode="before")
    @classmethod
    def _low_states_imply_bf16(cls, tables: Any) -> Any:
        """float8 matmuls and bfloat16 states need bf16: without a preset they imply it; a given preset stays."""
        if not isinstance(tables, dict):
            return tables
        precision, float8 = tables.get("precision", {}), tables.get("float8", {})
        if not isinstance(precision, dict) or not isinstance(float8, dict) or "preset" in precision:
            return tables
        is_low = any(precision.get(name) == "bfloat16" for name in LOW_STATES)
        if is_low or float8.get("linears") in ("auto", "all") or float8.get("experts") == "all":
            return {**tables, "precision": {**precision, "preset": "bf16"}}
        return tables

    @model_validator(mode="after")
    def _float8_follows_precision(self) -> Self:
        """Products and exchanges in float8 have sections of their own, which a preset or a component switches on."""
        policy, set_now = self.precision.policy(), dict[str, Section]()
        is_implied = policy.products in LOW_PRODUCTS
        implied: dict[str, Any] = {"linears": "all"}
        implied |= {"recipe": "nvfp4"} if policy.products == E2M1 else {}
        implied |= {"experts": "all"} if policy.experts in LOW_PRODUCTS else {}
        named = {**implied, **PRESETS[self.precision.preset].float8} if is_implied else {}
        update = {key: value for key, value in named.items() if key not in self.float8.model_fields_set}
        float8 = self.float8.model_copy(update=update)
        if "gather" not in self.float8.model_fields_set and (
            float8.recipe != GATHERED
            or float8.fallback_error
            or policy.gather == "int8"
            or (is_implied and policy.gather != E4M3)
        ):
            update["gather"] = "weights"
        if update:
            set_now["float8"] = self.float8.model_copy(update=update)
        if policy.dispatch == E4M3 and "wire" not in self.expert_parallel.model_fields_set:
            set_now["expert_parallel"] = self.expert_parallel.model_copy(update={"wire": "float8"})
        for name, section in set_now.items():
            object.__setattr__(self, name, section)  # frozen, and not yet seen by anyone
        return self

    def policy(self) -> PrecisionPolicy:
        """The formats of [precision], with what [float8] and [expert_parallel] say about theirs."""
        policy = self.precision.policy()
        has_float8, has_wire = self.float8.linears != "none", self.expert_parallel.wire == "float8"
        is_gathered = has_float8 and self.float8.gather == "float8" and self.data_parallel.zero > 0
        plain = policy.weights if policy.products in LOW_PRODUCTS else policy.products
        low = E2M1 if self.float8.recipe == "nvfp4" else E4M3
        return policy.model_copy(
            update={
                "products": low if has_float8 else plain,
                "experts": low if self.float8.experts == "all" else policy.weights,
                "gather": E4M3 if is_gathered else self.coded_gather or policy.weights,
                "dispatch": E4M3 if has_wire else policy.weights,
            }
        )

    @property
    def coded_gather(self) -> Format | None:
        """The format of codes with a scale per block in which sharded weights travel, those of float8 layers too."""
        name, has_float8 = self.precision.policy().gather, self.float8.linears != "none"
        is_gathered = has_float8 and self.float8.gather == "float8"
        return name if name in CODED and self.data_parallel.zero > 0 and not is_gathered else None

    @property
    def num_ranks(self) -> int:
        return self.mesh.num_ranks

    @property
    def num_reducing(self) -> int:
        """Ranks among which gradients are reduced: shards, or replicas without them."""
        mesh = self.mesh
        return mesh.cp * (mesh.dp_shard if self.data_parallel.zero > 0 else mesh.dp_replicate)

    @property
    def never_flushes(self) -> bool:
        """Whether micro-batches of several steps are in the pipeline at a time."""
        return self.mesh.pp > 1 and self.pipeline.never_drains

    @property
    def has_delayed_updates(self) -> bool:
        """Whether steps read weights without the newest updates: other mathematics, on purpose."""
        return self.never_flushes or self.offload.delayed

    @property
    def delayed_by(self) -> str:
        """What delays updates, for messages."""
        return "offload.delayed" if self.offload.delayed else self.pipeline.schedule

    @property
    def has_open_dispatcher(self) -> bool:
        """Whether the dispatcher is still to be chosen for the model."""
        return self.mesh.ep > 1 and self.expert_parallel.dispatcher == "auto"

    @property
    def strategy_name(self) -> str:
        """The common name of this data-parallel layout."""
        if self.data_parallel.is_threaded:
            return "DataParallel"
        zero, mesh = self.data_parallel.zero, self.mesh
        if zero == 0:
            axes_by_name = {"pipeline": mesh.pp, "tensor parallel": mesh.tp, "context parallel": mesh.cp}
            alone = next((name for name, degree in axes_by_name.items() if degree > 1), "single device")
            return "DDP" if mesh.dp_replicate > 1 else alone
        stage = {1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3 (FSDP)"}[zero]
        return f"HSDP {stage}" if mesh.dp_replicate > 1 else stage


SECTIONS = sections_of(Plan)
