"""The legality rules of plans, over columns: those of each axis, and those of all axes together.

A rule is True for the plans that break it. `check_plan` returns the reasons, with hints for a legal plan.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from weft.plan.axes import AXES
from weft.plan.axis import Rule, common, divisors, head_counts
from weft.plan.columns import NVME, TP_MODES, Bools, Columns, Ints
from weft.plan.request import Request
from weft.plan.time.float8 import has_float8


def _ranks_fill_the_cluster(request: Request, columns: Columns) -> Bools:
    return columns.num_ranks != request.cluster.num_devices


def _batch_divides(request: Request, columns: Columns) -> Bools:
    # grids partition the rows of a micro-batch further
    side = columns.tensor_side.astype(np.int64)
    chunks = side * np.where(columns.is_cube, side, columns.tensor_depth)
    return request.workload.samples % (columns.dp * columns.microbatches * chunks) != 0


def _sequence_divides(request: Request, columns: Columns) -> Bools:
    is_sharded = (columns.sequence_parallel > 0) & (columns.tp_mode == TP_MODES.index("1d")) & (columns.cp == 1)
    return request.workload.sequence_length % np.where(is_sharded, columns.tp, 1) != 0  # cp pads rows


def _mixture_is_of_the_model(request: Request, columns: Columns) -> Bools:
    return columns.full_blocks + columns.selective_blocks > request.shape.num_layers


def _offload_makes_sense(request: Request, columns: Columns) -> Bools:
    needs_host = (columns.offload_optimizer + columns.offload_activations + columns.offload_parameters) > 0
    return needs_host & (request.cluster.host_memory_bytes == 0)


def _files_need_a_disk(request: Request, columns: Columns) -> Bools:
    return (columns.offload_optimizer == NVME) & (request.cluster.nvme_bytes_per_s == 0)


def _inputs_are_recomputed(request: Request, columns: Columns) -> Bools:
    """Only inputs of fully recomputed blocks leave the device."""
    is_full = columns.recomputes("full") | (columns.recomputes("budget") & (columns.full_blocks > 0))
    return (columns.offload_activations > 0) & ~is_full & (columns.offload_blocks == 0)


def _tensors_are_of_kept_blocks(request: Request, columns: Columns) -> Bools:
    """Saved tensors of so many blocks leave, and of no pipeline."""
    return (columns.offload_blocks > _most_offloaded(request, columns)) & (columns.offload_blocks > 0)


def _most_offloaded(request: Request, columns: Columns) -> Ints:
    """Blocks that are not recomputed, if their tensors can leave."""
    kept = request.shape.num_layers - columns.full_blocks - columns.selective_blocks
    recomputes_all = columns.recomputes("full") | columns.recomputes("selective")
    cannot = recomputes_all | (columns.pp > 1) | (columns.offload_activations == 0)
    return np.asarray(np.where(cannot, 0, kept), dtype=np.int64)


def _inputs_are_whole(request: Request, columns: Columns) -> Bools:
    """Inputs are partitioned if all tensor-parallel ranks have the same ones: 1-D without sequence parallel."""
    is_whole = (columns.tp > 1) & ~columns.is_grid & (columns.sequence_parallel == 0)
    is_full = columns.recomputes("full") | (columns.recomputes("budget") & (columns.full_blocks > 0))
    return (columns.partition_inputs > 0) & ~(is_whole & is_full)


def _mlps_run_in_chunks(request: Request, columns: Columns) -> Bools:
    """`core.executable` names the feature; the model is asked by `chunked_mlps.py`."""
    keeps_products = columns.recomputes("selective") | (columns.selective_blocks > 0)
    is_other = keeps_products | (columns.compiled > 0) | (columns.ep > 1) | ((columns.tp > 1) & columns.is_grid)
    is_other = (
        is_other | (columns.float8_linears > 0) | (columns.offload_blocks > 0) | bool(request.shape.expert_layers)
    )
    return (columns.sequence_chunk > 0) & is_other


def _replicates_offloaded_weights(request: Request, columns: Columns) -> Bools:
    return (columns.offload_parameters > 0) & (columns.zero == 0) & (columns.dp > 1)


def _delay_needs_offload(request: Request, columns: Columns) -> Bools:
    return (columns.delayed_update > 0) & (columns.offload_optimizer == 0)


def _has_float8_matmul(request: Request, columns: Columns) -> Bools:
    """GPUs without float8 matmuls fail in the first one; CPUs emulate them."""
    is_missing = not has_float8(request.cluster.device) and not request.is_cpu
    return (columns.float8_linears > 0) & is_missing


def _float8_beside_bfloat16(request: Request, columns: Columns) -> Bools:
    return (columns.float8_linears > 0) & (request.precision.weights != "bfloat16")


def _wide_residual_on_a_grid(request: Request, columns: Columns) -> Bools:
    is_grid = (columns.tp > 1) & (columns.tp_mode != TP_MODES.index("1d"))
    return np.asarray(is_grid & request.precision.has_wide_residual)


_FIRST: tuple[Rule, ...] = (
    Rule(
        "ranks",
        "the mesh must use every device",
        _ranks_fill_the_cluster,
        lambda request, columns: f"make the product of the mesh {request.cluster.num_devices}",
    ),
    Rule(
        "batch",
        "the global batch must divide over data-parallel ranks and micro-batches",
        _batch_divides,
        lambda request, columns: _nearest_batch(request, columns),
    ),
    Rule("sequence", "the sequence must divide over sequence parallelism", _sequence_divides),
)
_LAST: tuple[Rule, ...] = (
    Rule(
        "mixture",
        "activations.mixture names more blocks than the model has",
        _mixture_is_of_the_model,
        lambda request, columns: f"set two numbers with a sum of at most {request.shape.num_layers}; [] chooses them",
    ),
    Rule(
        "float8",
        "the devices have no float8 matmuls",
        _has_float8_matmul,
        lambda request, columns: no_float8(request),
    ),
    Rule(
        "float8_weights",
        "float8 matmuls need bfloat16 weights",
        _float8_beside_bfloat16,
        lambda request, columns: "set precision.preset = 'bf16', or float8.linears = 'none'",
    ),
    Rule(
        "residual",
        "precision.residual = 'float32' beside 16 bits is not executed with tensor parallelism over a grid",
        _wide_residual_on_a_grid,
    ),
    Rule("host", "offload needs a host with memory", _offload_makes_sense),
    Rule(
        "disk",
        "offload.optimizer = 'nvme' needs nodes with a disk",
        _files_need_a_disk,
        lambda request, columns: "set offload.optimizer = 'cpu', or nvme_bytes_per_s of the node in a calibration",
    ),
    Rule(
        "offloaded_activations",
        "activations.offload moves inputs of fully recomputed blocks, and the plan recomputes none",
        _inputs_are_recomputed,
        lambda request, columns: "set activations.policy = 'full', or a budget's mixture with fully recomputed blocks",
    ),
    Rule(
        "offloaded_blocks",
        "activations.offload_blocks names more blocks than keep their activations; pipelines have none",
        _tensors_are_of_kept_blocks,
        lambda request, columns: f"set activations.offload_blocks = {int(_most_offloaded(request, columns)[0])}",
    ),
    Rule(
        "partition",
        "activations.partition needs full recompute and tensor parallelism of mode 1d without sequence parallel",
        _inputs_are_whole,
        lambda request, columns: _why_not_partitioned(columns),
    ),
    Rule(
        "chunks",
        "activations.sequence_chunk needs a dense model, without selective recompute, compiled blocks, float8 and tp",
        _mlps_run_in_chunks,
        lambda request, columns: "set activations.sequence_chunk = 0",
    ),
    Rule(
        "replicated_weights",
        "offload.parameters with data_parallel.zero = 0 keeps the full weights of every replica on the host",
        _replicates_offloaded_weights,
        lambda request, columns: "set data_parallel.zero = 1, 2 or 3, and the degree as mesh.dp_shard",
    ),
    Rule(
        "delayed",
        "offload.delayed delays the update of offloaded states, and offload.optimizer is 'none'",
        _delay_needs_offload,
        lambda request, columns: "set offload.optimizer = 'cpu', or offload.delayed = false",
    ),
)
RULES: tuple[Rule, ...] = (*_FIRST, *(rule for axis in AXES for rule in axis.rules), *_LAST)


def legal_rows(request: Request, columns: Columns) -> tuple[Bools, dict[str, int]]:
    """(legal plans, plans refused per rule). A plan counts for the first rule that it breaks."""
    alive = np.ones(len(columns), dtype=bool)
    refused: dict[str, int] = {}
    for rule in RULES:
        broken = alive & rule.broken(request, columns)
        count = int(broken.sum())
        if count:
            refused[rule.sentence] = refused.get(rule.sentence, 0) + count
            alive &= ~broken
    return alive, refused


def check_plan(request: Request, columns: Columns, *, names: Collection[str] | None = None) -> list[tuple[str, str]]:
    """Reasons against the one plan in `columns`, as (sentence, hint): of all rules, or of those with these names."""
    reasons = []
    for rule in RULES:
        if names is not None and rule.name not in names:
            continue
        if bool(rule.broken(request, columns)[0]):
            hint = rule.nearest(request, columns) if rule.nearest else "change that part of the plan"
            reasons.append((rule.sentence, hint))
    return reasons


def nearest_legal(request: Request, fixed: dict[str, Any]) -> str:
    """A hint if no plan is legal: the fixed key that excludes all plans, or the batch."""
    if fixed.get("float8.linears", "none") != "none" and not has_float8(request.cluster.device):
        return no_float8(request)
    counts, tp = head_counts(request), int(fixed.get("mesh.tp", 1))
    heads = common(counts)
    if counts and heads % tp:
        return f"{heads} attention heads do not divide over tp = {tp}; tp may be {divisors(heads)}"
    degrees = [int(fixed.get(f"mesh.{axis}", 1)) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")]
    if request.cluster.num_devices % int(np.prod(degrees)):
        product = int(np.prod(degrees))
        return f"the fixed degrees multiply to {product}, which does not divide {request.cluster.num_devices} devices"
    ranks = degrees[0] * degrees[1]
    if request.workload.samples % ranks:
        above = -(-request.workload.samples // ranks) * ranks
        return f"a global batch of {request.workload.samples} does not divide over {ranks} ranks; {above} would"
    return "fix fewer keys with --set, or change the global batch or the sequence length"


def no_float8(request: Request) -> str:
    """A hint for devices without float8 matmuls."""
    name = request.cluster.device.name
    return f"{name} supports {', '.join(request.cluster.device.rates)}; set float8.linears = 'none'"


def _why_not_partitioned(columns: Columns) -> str:
    if columns.tp[0] == 1:
        return "set activations.partition = false: one rank has the input alone"
    if columns.is_grid[0] or columns.sequence_parallel[0]:
        return "set activations.partition = false: with sequence parallel and in grids inputs are sharded already"
    return "set activations.policy = 'full', or activations.partition = false"


def _nearest_batch(request: Request, columns: Columns) -> str:
    chunks = int(columns.dp[0] * columns.microbatches[0])
    batch = request.workload.samples
    below, above = batch // chunks * chunks, -(-batch // chunks) * chunks
    return f"use a global batch of {f'{below} or ' if below else ''}{above}"
