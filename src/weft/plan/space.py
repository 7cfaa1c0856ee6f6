"""The search space: all combinations of degrees, ZeRO stages, schedules, micro-batches and recompute.

Degrees are divisors of the number of devices. Fixed keys narrow the space before it is built; plans that the rules
refuse are counted by reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from weft.core import axes
from weft.core.experts import WIRE_FORMATS, WireFormat
from weft.core.float8_section import GATHERED, RECIPES, Float8Choice, Float8Recipe
from weft.core.offload_sizes import CHUNK_ELEMENTS
from weft.core.plan import BUCKET_BYTES, SPLIT, V_SHAPED, ExpertParallel, ExpertTensor
from weft.core.precision import E4M3, LOW_PRODUCTS
from weft.plan.columns import (
    CP_SPLITS,
    DISPATCHERS,
    EXPERT_TENSORS,
    FLOAT8,
    HOMES,
    LOOPED,
    RECOMPUTE,
    SCHEDULES,
    TP_MODES,
    UPDATES,
    Columns,
    Ints,
)
from weft.plan.cp.choice import with_attentions
from weft.plan.dp.neighbours import chosen_neighbours
from weft.plan.ep.choice import chosen_dispatchers
from weft.plan.request import Request

SYNCHRONOUS = ("1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev", "gpipe", "looped_bfs", "naive")
MAX_PIPELINE = 128


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """Values that the search may choose; a key of `fixed` ("mesh.tp", "data_parallel.zero", …) allows one value."""

    schedules: tuple[str, ...] = SYNCHRONOUS  # asynchronous ones change the result of training: only if fixed
    recompute: tuple[str, ...] = ("none", "selective", "full")
    tp_modes: tuple[str, ...] = ("1d", "2d", "2.5d", "3d")
    virtual_stages: tuple[int, ...] = (1, 2, 4, 8)
    fixed: dict[str, object] = field(default_factory=dict)


# Keys that a search varies or holds fixed; others need a plan.toml and --plan.
SEARCHED = frozenset(
    (
        *(f"mesh.{axis}" for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")),
        *(
            "data_parallel.zero",
            "data_parallel.secondary_shard",
            "data_parallel.reduce_neighbours",
            "data_parallel.error_feedback",
            "tensor_parallel.mode",
            "tensor_parallel.sequence_parallel",
        ),
        *(
            "tensor_parallel.loss_parallel",
            "expert_parallel.dispatcher",
            "expert_parallel.tensor",
            "expert_parallel.wire",
            "expert_parallel.chunks",
            "context_parallel.attention",
            "context_parallel.split",
            "context_parallel.ulysses",
            "pipeline.schedule",
            "pipeline.microbatches",
            "pipeline.virtual_stages",
        ),
        *("activations.policy", "activations.offload", "activations.partition", "compile.enabled"),
        *(f"offload.{key}" for key in ("optimizer", "parameters", "masters", "update", "delayed", "durable")),
        *("offload.staging_bytes", "offload.chunk_elements"),
        *("kernels.loss", "float8.linears", "float8.gather", "float8.recipe", "float8.experts"),
    )
)


def check_fixed(fixed: Mapping[str, object]) -> list[tuple[str, str]]:
    """Reasons against fixing these keys, as (sentence, hint): a key without effect must not pass silently."""
    reasons = [
        (f"the search does not vary {key}", "set it in a plan.toml and use --plan")
        for key in fixed
        if key not in SEARCHED and not key.startswith("precision.")
    ]
    if fixed.get("activations.policy") == "budget":
        hint = "fix none, selective or full; or set a budget in a plan.toml and use --plan"
        reasons.append(("the search does not choose blocks (activations.policy = 'budget')", hint))
    return reasons


def enumerate_plans(request: Request, freedom: Freedom) -> Columns:
    """All candidates, legal or not."""
    meshes = np.asarray(list(_meshes(request, freedom)), dtype=np.int64).reshape(-1, 7)
    tables = []
    for is_piped in (False, True):
        ways = np.asarray(list(_ways(freedom, has_pipeline=is_piped)), dtype=np.int64).reshape(-1, 5)
        mine = meshes[(meshes[:, 4] > 1) == is_piped]
        # with tp = 1 all tensor modes are the same plan
        one_d = ways[ways[:, 3] == 0]
        tables += [_cross_product(mine[mine[:, 3] == 1], one_d), _cross_product(mine[mine[:, 3] > 1], ways)]
    table = _with_microbatches(request, np.concatenate(tables), freedom)
    return _columns(table, freedom, request)


def _meshes(request: Request, freedom: Freedom) -> Iterator[tuple[int, ...]]:
    """(dp_replicate, dp_shard, cp, tp, pp, ep, zero) with the product of the first five = devices."""
    devices = request.cluster.num_devices
    for tp in _choices("mesh.tp", _divisors(devices), freedom, limit=request.cluster.devices_per_node):
        for pp in _choices(
            "mesh.pp", _divisors(devices // tp), freedom, limit=min(MAX_PIPELINE, request.shape.num_layers)
        ):
            for cp in _choices("mesh.cp", _divisors(devices // tp // pp), freedom, limit=_max_context(request)):
                if devices % (tp * pp * cp):
                    continue
                yield from _data_parallel_splits(request, freedom, devices // (tp * pp * cp), cp=cp, tp=tp, pp=pp)


def _data_parallel_splits(
    request: Request, freedom: Freedom, dp: int, *, cp: int, tp: int, pp: int
) -> Iterator[tuple[int, ...]]:
    counts = _replica_counts(request, freedom, dp, inner=tp * cp)
    for replicas in _choices("mesh.dp_replicate", counts, freedom, limit=dp):
        if dp % replicas:
            continue
        shards = dp // replicas
        if shards != freedom.fixed.get("mesh.dp_shard", shards):
            continue
        stages = (0,) if shards * cp == 1 else (1, 2, 3) if shards > 1 else (0, 1, 2, 3)
        for zero in stages:
            if zero != freedom.fixed.get("data_parallel.zero", zero):
                continue
            for ep in _expert_degrees(request, freedom, {axes.DP_SHARD: shards, axes.CP: cp, axes.TP: tp}):
                yield replicas, shards, cp, tp, pp, ep, zero


def _replica_counts(request: Request, freedom: Freedom, dp: int, *, inner: int) -> list[int]:
    """1 replica, replicas only, and shards over 1, 4 or 16 nodes with replicas across; or by a fixed mesh.dp_shard."""
    if "mesh.dp_shard" in freedom.fixed:
        return [dp // int(str(freedom.fixed["mesh.dp_shard"])) or 1]
    per_node = request.cluster.devices_per_node
    found = {1, dp}
    for nodes in (1, 4, 16):
        shards = nodes * per_node // inner
        if 1 < shards < dp and dp % shards == 0:
            found.add(dp // shards)
    return sorted(found)


def _expert_degrees(request: Request, freedom: Freedom, degrees: Mapping[str, int]) -> list[int]:
    experts = [num_experts for num_experts, _ in request.shape.expert_layers]
    if not experts or request.shape.whole_experts:
        return _choices("mesh.ep", [1], freedom, limit=1)
    pool = math.prod(degrees[axis] for axis in ExpertParallel(tensor=_expert_tensor(freedom)).axis_names)
    common = int(np.gcd.reduce(experts))
    return _choices("mesh.ep", [d for d in _divisors(common) if pool % d == 0], freedom, limit=pool)


def _ways(freedom: Freedom, *, has_pipeline: bool) -> Iterator[tuple[int, int, int, int, int]]:
    """(schedule, virtual stages, recompute, tensor mode, offloaded optimizer)."""
    schedules = _schedules(freedom)
    if not has_pipeline:  # without a pipeline there is one schedule, named by the default
        schedules = ("1f1b",) if freedom.fixed.get("pipeline.schedule", "1f1b") == "1f1b" else ()
    for schedule in schedules:
        for v in _stages_of(schedule, freedom):
            for recompute in freedom.recompute:
                if recompute != freedom.fixed.get("activations.policy", recompute):
                    continue
                for mode in freedom.tp_modes:
                    if mode != freedom.fixed.get("tensor_parallel.mode", mode):
                        continue
                    offload = HOMES.index(str(freedom.fixed.get("offload.optimizer", "none")))
                    yield SCHEDULES.index(schedule), v, RECOMPUTE.index(recompute), TP_MODES.index(mode), offload


def _schedules(freedom: Freedom) -> tuple[str, ...]:
    given = freedom.fixed.get("pipeline.schedule")
    return freedom.schedules if given is None else (str(given),)


def _stages_of(schedule: str, freedom: Freedom) -> tuple[int, ...]:
    if schedule in V_SHAPED:
        stages: tuple[int, ...] = (2,)
    elif schedule in LOOPED:
        stages = tuple(v for v in freedom.virtual_stages if v > 1)
    else:
        stages = (1,)
    return tuple(v for v in stages if v == freedom.fixed.get("pipeline.virtual_stages", v))


def _with_microbatches(request: Request, table: Ints, freedom: Freedom) -> Ints:
    """Each candidate with every micro-batch size that is a power of two and divides its rows."""
    batch = request.workload.samples
    rows = np.maximum(batch // np.maximum(table[:, 0] * table[:, 1], 1), 1)
    given = freedom.fixed.get("pipeline.microbatches")
    if given is not None:
        return np.column_stack([table, np.full(len(table), int(str(given)))])
    tables = []
    is_naive = table[:, 7] == SCHEDULES.index("naive")  # a baseline: further micro-batches only repeat its bubble
    for size in (1, 2, 4, 8, 16, 32, 64):
        chosen = (rows >= size) & (rows % size == 0) & (~is_naive | (rows == size))
        tables.append(np.column_stack([table[chosen], rows[chosen] // size]))
    return np.concatenate(tables)


def _cross_product(left: Ints, right: Ints) -> Ints:
    if not len(left) or not len(right):
        return np.zeros((0, left.shape[1] + 5), dtype=np.int64)
    return np.concatenate([np.repeat(left, len(right), axis=0), np.tile(right, (len(left), 1))], axis=1)


def _columns(table: Ints, freedom: Freedom, request: Request) -> Columns:
    one_d = (table[:, 10] == 0) & (table[:, 3] > 1) & request.shape.has_straight_stream
    compiled, fused = _fast_path(table, freedom, request)
    size = len(table)
    # float8 changes results, so it is only used if fixed, here or by the precision
    policy = request.precision
    usual_wire: WireFormat = "float8" if policy.dispatch == E4M3 else "activations"
    wire = cast(WireFormat, freedom.fixed.get("expert_parallel.wire", usual_wire))
    linears = cast(
        Float8Choice, freedom.fixed.get("float8.linears", "all" if policy.products in LOW_PRODUCTS else "none")
    )
    recipe = cast(Float8Recipe, freedom.fixed.get("float8.recipe", GATHERED))
    gather = freedom.fixed.get("float8.gather", "float8" if recipe == GATHERED else "weights")
    split = freedom.fixed.get("context_parallel.split", "zigzag")

    def number(key: str, default: int) -> Ints:
        return np.full(size, int(str(freedom.fixed.get(key, default))), dtype=np.int64)

    def switch(key: str, default: Ints) -> Ints:
        return default if key not in freedom.fixed else np.full(size, int(bool(freedom.fixed[key])), dtype=np.int64)

    columns = Columns(
        dp_replicate=table[:, 0], dp_shard=table[:, 1], cp=table[:, 2], tp=table[:, 3], pp=table[:, 4], ep=table[:, 5],
        dispatcher=_dispatchers(table[:, 5], freedom, request),
        expert_tensor=np.full(size, EXPERT_TENSORS.index(_expert_tensor(freedom)), dtype=np.int64),
        wire=np.full(size, WIRE_FORMATS.index(wire), dtype=np.int64),
        expert_chunks=number("expert_parallel.chunks", 1),
        cp_attention=np.zeros(size, dtype=np.int64),
        cp_split=np.full(size, CP_SPLITS.index(str(split)), dtype=np.int64),
        cp_ulysses=number("context_parallel.ulysses", 1),
        zero=table[:, 6], schedule=table[:, 7], virtual_stages=table[:, 8], recompute=table[:, 9], tp_mode=table[:, 10],
        offload_optimizer=table[:, 11], microbatches=table[:, 12],
        sequence_parallel=switch("tensor_parallel.sequence_parallel", one_d.astype(np.int64)),
        loss_parallel=switch("tensor_parallel.loss_parallel", (table[:, 3] > 1).astype(np.int64)),
        offload_activations=np.full(size, int(_is_away("activations.offload", freedom)), dtype=np.int64),
        offload_parameters=np.full(size, int(_is_away("offload.parameters", freedom)), dtype=np.int64),
        offload_masters=np.full(size, int(freedom.fixed.get("offload.masters") == "host"), dtype=np.int64),
        offload_update=np.full(size, UPDATES.index(str(freedom.fixed.get("offload.update", "auto"))), dtype=np.int64),
        staging_bytes=number("offload.staging_bytes", 0),
        chunk_elements=number("offload.chunk_elements", CHUNK_ELEMENTS),
        durable_steps=np.full(size, int(freedom.fixed.get("offload.durable") == "step"), dtype=np.int64),
        delayed_update=switch("offload.delayed", np.zeros(size, dtype=np.int64)),
        offload_blocks=np.zeros(size, dtype=np.int64),
        sequence_chunk=number("activations.sequence_chunk", 0),
        partition_inputs=switch("activations.partition", np.zeros(size, dtype=np.int64)),
        compiled=switch("compile.enabled", compiled),
        fused_loss=fused,
        float8=np.full(size, FLOAT8.index(linears if gather == "float8" else "none"), dtype=np.int64),
        float8_linears=np.full(size, FLOAT8.index(linears), dtype=np.int64),
        float8_recipe=np.full(size, RECIPES.index(recipe), dtype=np.int64),
        float8_experts=np.full(size, int(freedom.fixed.get("float8.experts") == "all"), dtype=np.int64),
        vertical_sync=np.zeros(size, dtype=np.int64), find_unused=np.zeros(size, dtype=np.int64),
        bucket_bytes=np.full(size, BUCKET_BYTES, dtype=np.int64), all_reduce=np.zeros(size, dtype=np.int64),
        secondary_shard=number("data_parallel.secondary_shard", 0),
        reduce_neighbours=number("data_parallel.reduce_neighbours", 0),
        error_feedback=switch("data_parallel.error_feedback", np.zeros(size, dtype=np.int64)),
        full_blocks=np.zeros(size, dtype=np.int64), selective_blocks=np.zeros(size, dtype=np.int64),
        partition=np.zeros(size, dtype=np.int64),
    )  # fmt: skip
    if "data_parallel.reduce_neighbours" not in freedom.fixed:
        columns = replace(columns, reduce_neighbours=chosen_neighbours(request, columns))
    return with_attentions(request, columns, freedom.fixed)


def _dispatchers(ep: Ints, freedom: Freedom, request: Request) -> Ints:
    """The dispatcher of each plan: the fixed one, or the one that `core.experts` chooses for the model."""
    asked = str(freedom.fixed.get("expert_parallel.dispatcher", "auto"))
    if asked != "auto":
        return np.full(len(ep), DISPATCHERS.index(asked), dtype=np.int64)
    return chosen_dispatchers(request.shape, ep, np.zeros_like(ep))


def _expert_tensor(freedom: Freedom) -> ExpertTensor:
    return cast(ExpertTensor, freedom.fixed.get("expert_parallel.tensor", ExpertParallel().tensor))


def _fast_path(table: Ints, freedom: Freedom, request: Request) -> tuple[Ints, Ints]:
    """Defaults of compiled blocks and fused loss, as in `resolve.with_choices`, for columns."""
    is_gpu = not request.is_cpu
    is_split = (table[:, 4] > 1) & np.isin(table[:, 7], [SCHEDULES.index(name) for name in SPLIT])
    selects = table[:, 9] == RECOMPUTE.index("selective")
    compiled = is_gpu & (table[:, 3] == 1) & ~is_split & ~selects & (not request.shape.has_dropout)
    compiled &= not freedom.fixed.get("activations.sequence_chunk")
    compiled &= not (request.precision.has_wide_residual or request.shape.has_codes)
    asked = freedom.fixed.get("kernels.loss")
    is_open = asked is None and bool(freedom.fixed.get("compile.enabled", True))
    fused = is_gpu & is_open & ((table[:, 3] == 1) | (table[:, 10] == 0)) | (asked == "fused")
    return compiled.astype(np.int64), np.broadcast_to(fused, len(table)).astype(np.int64)


def _is_away(key: str, freedom: Freedom) -> bool:
    return freedom.fixed.get(key, "none") != "none"


def _choices(key: str, values: list[int], freedom: Freedom, *, limit: int) -> list[int]:
    given = freedom.fixed.get(key)
    return [int(str(given))] if given is not None else [value for value in values if value <= limit]


def _max_context(request: Request) -> int:
    """Largest cp: chunks of a sequence have at least 4,096 tokens."""
    if any(kind.attention is None for kind in request.shape.kinds):
        return 1
    return max(1, request.workload.sequence_length // 4096)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
