"""What makes a plan legal: named rules over whole columns, each with the sentence that says why a plan is refused.

A rule returns True where a plan breaks it. `check_plan` turns the broken ones into reasons with what would be legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.plan.columns import LOOPED, SCHEDULES, TP_MODES, Bools, Columns, Ints
from weft.plan.float8 import has_float8
from weft.plan.request import Request


@dataclass(frozen=True)
class Rule:
    """`broken` marks the plans that break it; `sentence` says why, `nearest` what would be legal."""

    name: str
    sentence: str
    broken: Callable[[Request, Columns], Bools]
    nearest: Callable[[Request, Columns], str] | None = None


def _ranks_fill_the_cluster(request: Request, columns: Columns) -> Bools:
    return columns.num_ranks != request.cluster.num_devices


def _batch_divides(request: Request, columns: Columns) -> Bools:
    # grids deal the rows of a micro-batch out once more
    side = columns.tensor_side.astype(np.int64)
    chunks = side * np.where(columns.is_cube, side, columns.tensor_depth)
    return request.workload.global_batch % (columns.dp * columns.microbatches * chunks) != 0


def _sequence_divides(request: Request, columns: Columns) -> Bools:
    pieces = np.where(columns.cp > 1, 2 * columns.cp, 1)  # a causal ring gives each rank an early and a late piece
    is_cut = (columns.sequence_parallel > 0) & (columns.tp_mode == TP_MODES.index("1d"))
    pieces = pieces * np.where(is_cut, columns.tp, 1)
    return request.workload.sequence_length % pieces != 0


def _heads_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for heads in _head_counts(request):
        broken |= heads % _line(columns) != 0
    return broken


def _key_value_heads_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for block in request.shape.kinds:
        if block.attention is None or block.attention.is_latent or not block.cuts("attention"):
            continue
        heads, ranks = block.attention.num_kv_heads, _line(columns)
        cannot_repeat = columns.is_grid | block.attention.has_grouped_order
        broken |= (heads % ranks != 0) & ((ranks % heads != 0) | cannot_repeat)
    return broken


def _widths_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for block in request.shape.kinds:
        for linear in block.linears:
            if linear.style == "row" and linear.role != "attention":
                # experts are dealt out first, and cut over the ranks that are left
                ranks = columns.expert_tp if linear.role == "expert" else _line(columns)
                broken |= linear.in_features % ranks != 0
    return broken


def _line(columns: Columns) -> Ints:
    """Ranks that heads and widths are dealt out over: all of tp, or a side of the grid."""
    return np.where(columns.is_grid, columns.tensor_side.astype(np.int64), columns.tp)


def _grid_fits(request: Request, columns: Columns) -> Bools:
    """Sides divide the hidden size, a cube's twice; families are those compared with one process on grids."""
    side = columns.tensor_side.astype(np.int64)
    hidden = request.shape.hidden_size % (side * np.where(columns.is_cube, side, 1)) != 0
    return columns.is_grid & (hidden | (not request.shape.has_grids))


def _vocabulary_suffices(request: Request, columns: Columns) -> Bools:
    """Rows are dealt out in runs of ceil(rows / tp): the last rank must have some."""
    rows, chunks = request.shape.vocab_size, _line(columns) ** np.where(columns.is_cube, 2, 1)
    is_cut = request.shape.has_cut_table or request.shape.has_cut_head
    return np.asarray(is_cut & (-(-rows // chunks) * (chunks - 1) >= rows) & (chunks > 1), dtype=bool)


def _something_is_cut(request: Request, columns: Columns) -> Bools:
    has_regions = any(linear.style == "row" for block in request.shape.kinds for linear in block.linears)
    return (columns.tp > 1) & (not has_regions)


def _stream_is_straight(request: Request, columns: Columns) -> Bools:
    is_asked = (columns.sequence_parallel > 0) & (columns.tp > 1) & (columns.tp_mode == TP_MODES.index("1d"))
    return is_asked & (not request.shape.has_straight_stream)


def _tensor_stays_in_node(request: Request, columns: Columns) -> Bools:
    return (columns.tp > request.cluster.devices_per_node) & (not request.tp_may_leave_node)


def _tensor_mode_fits(request: Request, columns: Columns) -> Bools:
    tp = columns.tp
    square = np.sqrt(tp) == np.floor(np.sqrt(tp))
    cube = np.round(np.cbrt(tp)) ** 3 == tp
    layered = columns.tensor_depth > 1
    mode = columns.tp_mode
    return (
        ((mode == TP_MODES.index("2d")) & (~square | (tp == 1)))
        | ((mode == TP_MODES.index("2.5d")) & ~layered)
        | ((mode == TP_MODES.index("3d")) & (~cube | (tp == 1)))
    )


def _experts_divide(request: Request, columns: Columns) -> Bools:
    experts = {block.moe.num_experts for block in request.shape.kinds if block.moe is not None}
    if not experts:
        return columns.ep > 1
    broken = (columns.dp_shard * columns.cp * columns.tp) % columns.ep != 0
    for count in experts:
        broken |= count % columns.ep != 0
    return broken


def _zero_matches_mesh(request: Request, columns: Columns) -> Bools:
    return (columns.zero == 0) & (columns.dp_shard > 1)


def _stages_have_blocks(request: Request, columns: Columns) -> Bools:
    stages = columns.pp * np.where(columns.is_v_shaped, 2, columns.virtual_stages)
    return stages > request.shape.num_layers


def _blocks_add_up(request: Request, columns: Columns) -> Bools:
    """Of those dealt by hand: as many numbers as stages, and together all blocks of the model."""
    lengths, totals = (np.asarray([of(deal) for deal in columns.deals], dtype=np.int64) for of in (len, sum))
    stages = columns.pp * columns.virtual_stages
    wrong = (lengths[columns.deal] != stages) | (totals[columns.deal] != request.shape.num_layers)
    return (columns.deal > 0) & wrong


def _mixture_is_of_the_model(request: Request, columns: Columns) -> Bools:
    return columns.full_blocks + columns.selective_blocks > request.shape.num_layers


def _virtual_stages_suit(request: Request, columns: Columns) -> Bools:
    looped = np.isin(columns.schedule, [SCHEDULES.index(name) for name in LOOPED])
    v = columns.virtual_stages
    wants_one = ~looped & ~columns.is_v_shaped
    return (
        (wants_one & (v != 1))
        | (columns.is_v_shaped & (v != 2))
        | (looped & (columns.pp > 1) & (v < 2))
        | ((columns.pp == 1) & (v != 1))
    )


def _microbatches_suit(request: Request, columns: Columns) -> Bools:
    m, p = columns.microbatches, columns.pp
    is_pipeline = p > 1
    return is_pipeline & (
        (columns.named("naive") & (m != 1))
        | (columns.named("interleaved_1f1b") & (m % p != 0))
        | (columns.named("dualpipev") & (m < 2 * p))
        | ((columns.named("zbv") | columns.named("pipedream_2bw")) & (m < p))
    )


def _schedule_without_pipeline(request: Request, columns: Columns) -> Bools:
    return (columns.pp == 1) & ~columns.named("1f1b")


def _gathers_with_pipeline(request: Request, columns: Columns) -> Bools:
    """Asynchronous pipelines keep several whole weight versions: nothing there to gather anew."""
    is_async = columns.named("pipedream") | columns.named("pipedream_2bw")
    return is_async & (columns.zero > 0) & (columns.pp > 1)


def _offload_makes_sense(request: Request, columns: Columns) -> Bools:
    needs_host = (columns.offload_optimizer + columns.offload_activations + columns.offload_parameters) > 0
    return needs_host & (request.cluster.host_memory_bytes == 0)


def _has_float8_products(request: Request, columns: Columns) -> Bools:
    """A GPU without them fails in its first product; a CPU multiplies what was rounded."""
    is_missing = not has_float8(request.cluster.device) and not request.is_cpu
    return (columns.float8_linears > 0) & is_missing


def _float8_beside_bfloat16(request: Request, columns: Columns) -> Bools:
    return (columns.float8_linears > 0) & (request.precision.weights != "bfloat16")


RULES: tuple[Rule, ...] = (
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
    Rule("sequence", "the sequence must divide over context and sequence parallelism", _sequence_divides),
    Rule(
        "heads",
        "attention heads must divide over tp",
        _heads_divide,
        lambda request, columns: f"tp may be {_divisors(_common(_head_counts(request)))}",
    ),
    Rule(
        "key_value_heads",
        "key-value heads must divide over tp, or tp over them",
        _key_value_heads_divide,
        lambda request, columns: f"tp may be {_divisors(_common(_head_counts(request)))}",
    ),
    Rule("widths", "the widths of MLPs and experts must divide over tp", _widths_divide),
    Rule("vocabulary", "the vocabulary has too few rows for tp", _vocabulary_suffices),
    Rule(
        "regions",
        "no part of the model can be divided over tensor-parallel ranks",
        _something_is_cut,
        lambda request, columns: "use mesh.tp = 1; ZeRO-3 (data_parallel.zero = 3) shards any model",
    ),
    Rule(
        "stream",
        "sequence parallel does not work with this family's blocks",
        _stream_is_straight,
        lambda request, columns: "set tensor_parallel.sequence_parallel = false",
    ),
    Rule("node", "tensor parallelism stays inside a node", _tensor_stays_in_node),
    Rule("tensor_mode", "2d wants tp = q x q, 2.5d d x q x q, 3d a cube", _tensor_mode_fits),
    Rule(
        "grid",
        "a grid of tensor parallelism must divide the hidden size, and know the family",
        _grid_fits,
        lambda request, columns: "use tensor_parallel.mode = '1d'",
    ),
    Rule("experts", "experts must divide over ep, and ep over dp_shard x cp x tp", _experts_divide),
    Rule("zero", "shards want a ZeRO stage", _zero_matches_mesh),
    Rule(
        "stages",
        "every pipeline stage needs a block",
        _stages_have_blocks,
        lambda request, columns: f"pp x virtual_stages may be at most {request.shape.num_layers}",
    ),
    Rule(
        "blocks",
        "pipeline.blocks does not deal all blocks of the model to the stages",
        _blocks_add_up,
        lambda request, columns: _numbers_of_blocks(request, columns),
    ),
    Rule(
        "mixture",
        "activations.mixture names more blocks than the model has",
        _mixture_is_of_the_model,
        lambda request, columns: f"two numbers that add up to at most {request.shape.num_layers}; [] has them chosen",
    ),
    Rule("virtual_stages", "the schedule does not go with that many stages a rank", _virtual_stages_suit),
    Rule("microbatches", "the schedule does not go with that many micro-batches", _microbatches_suit),
    Rule("schedule", "a schedule is for a pipeline", _schedule_without_pipeline),
    Rule(
        "asynchronous",
        "an asynchronous pipeline keeps whole weights, so it takes no ZeRO stage",
        _gathers_with_pipeline,
    ),
    Rule(
        "float8",
        "the devices have no float8 products",
        _has_float8_products,
        lambda request, columns: no_float8(request),
    ),
    Rule(
        "float8_weights",
        "float8 products stand beside bfloat16 weights",
        _float8_beside_bfloat16,
        lambda request, columns: "set precision.preset = 'bf16', or float8.linears = 'none'",
    ),
    Rule("host", "offload needs a host with memory", _offload_makes_sense),
)


def legal_rows(request: Request, columns: Columns) -> tuple[Bools, dict[str, int]]:
    """(which plans are legal, how many each rule refused). A plan counts for the first rule it breaks."""
    alive = np.ones(len(columns), dtype=bool)
    refused: dict[str, int] = {}
    for rule in RULES:
        broken = alive & rule.broken(request, columns)
        count = int(broken.sum())
        if count:
            refused[rule.sentence] = refused.get(rule.sentence, 0) + count
            alive &= ~broken
    return alive, refused


def check_plan(request: Request, columns: Columns) -> list[tuple[str, str]]:
    """Reasons against the one plan in `columns`, as (sentence, hint)."""
    reasons = []
    for rule in RULES:
        if bool(rule.broken(request, columns)[0]):
            hint = rule.nearest(request, columns) if rule.nearest else "change that part of the plan"
            reasons.append((rule.sentence, hint))
    return reasons


def nearest_legal(request: Request, fixed: dict[str, Any]) -> str:
    """What to change when nothing is legal: the fixed key that no plan goes with, or the batch."""
    if fixed.get("float8.linears", "none") != "none" and not has_float8(request.cluster.device):
        return no_float8(request)
    counts, tp = _head_counts(request), int(fixed.get("mesh.tp", 1))
    heads = _common(counts)
    if counts and heads % tp:
        return f"{heads} attention heads do not divide over tp = {tp}; tp may be {_divisors(heads)}"
    degrees = [int(fixed.get(f"mesh.{axis}", 1)) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")]
    if request.cluster.num_devices % int(np.prod(degrees)):
        product = int(np.prod(degrees))
        return f"the fixed degrees multiply to {product}, which does not divide {request.cluster.num_devices} devices"
    ranks = degrees[0] * degrees[1]
    if request.workload.global_batch % ranks:
        above = -(-request.workload.global_batch // ranks) * ranks
        return f"a global batch of {request.workload.global_batch} does not divide over {ranks} ranks; {above} would"
    return "fix fewer keys with --set, or change the global batch or the sequence length"


def no_float8(request: Request) -> str:
    """What to do on devices without such units."""
    name = request.cluster.device.name
    return f"{name} multiplies in {', '.join(request.cluster.device.rates)}; set float8.linears = 'none'"


def _head_counts(request: Request) -> list[int]:
    blocks = [block for block in request.shape.kinds if block.cuts("attention")]
    return [block.attention.num_heads for block in blocks if block.attention is not None]


def _common(counts: list[int]) -> int:
    return int(np.gcd.reduce(counts)) if counts else 1


def _divisors(number: int) -> str:
    found = [str(divisor) for divisor in range(1, number + 1) if number % divisor == 0]
    return ", ".join(found)


def _numbers_of_blocks(request: Request, columns: Columns) -> str:
    stages, blocks = int(columns.pp[0] * columns.virtual_stages[0]), request.shape.num_layers
    return f"name {stages} numbers, each at least 1, that add up to {blocks}; [] deals by cost"


def _nearest_batch(request: Request, columns: Columns) -> str:
    pieces = int(columns.dp[0] * columns.microbatches[0])
    batch = request.workload.global_batch
    below, above = batch // pieces * pieces, -(-batch // pieces) * pieces
    return f"use a global batch of {f'{below} or ' if below else ''}{above}"
