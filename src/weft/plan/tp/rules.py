"""Legality of tensor parallelism: heads, widths and vocabulary divide, the axis stays in a node."""

from __future__ import annotations

import numpy as np

from weft.core.optimizers import ROWS_ARE_SHARDED
from weft.plan.axis import Rule, common, divisors, head_counts, sharding_ranks
from weft.plan.columns import TP_MODES, Bools, Columns
from weft.plan.request import Request
from weft.plan.tp.float8 import blocks_are_cut


def _heads_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for heads in head_counts(request):
        broken |= heads % sharding_ranks(columns) != 0
    return broken


def _key_value_heads_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for block in request.shape.kinds:
        if block.attention is None or block.attention.is_latent or not block.shards("attention"):
            continue
        heads, ranks = block.attention.num_kv_heads, sharding_ranks(columns)
        cannot_repeat = columns.is_grid | block.attention.has_grouped_order
        broken |= (heads % ranks != 0) & ((ranks % heads != 0) | cannot_repeat)
    return broken


def _widths_divide(request: Request, columns: Columns) -> Bools:
    broken = np.zeros(len(columns), dtype=bool)
    for block in request.shape.kinds:
        for linear in block.linears:
            if linear.style == "row" and linear.role != "attention":
                ranks = columns.expert_tp if linear.role == "expert" else sharding_ranks(columns)
                broken |= linear.in_features % ranks != 0
    return broken


def _vocabulary_suffices(request: Request, columns: Columns) -> Bools:
    """Shards have ceil(rows / tp) rows: the last rank must have some."""
    rows, chunks = request.shape.vocab_size, sharding_ranks(columns) ** np.where(columns.is_cube, 2, 1)
    is_sharded = request.shape.has_sharded_table or request.shape.has_sharded_head
    return np.asarray(is_sharded & (-(-rows // chunks) * (chunks - 1) >= rows) & (chunks > 1), dtype=bool)


def _something_is_sharded(request: Request, columns: Columns) -> Bools:
    has_regions = any(linear.style == "row" for block in request.shape.kinds for linear in block.linears)
    return (columns.tp > 1) & (not has_regions)


def _stream_is_straight(request: Request, columns: Columns) -> Bools:
    is_asked = (columns.sequence_parallel > 0) & (columns.tp > 1) & (columns.tp_mode == TP_MODES.index("1d"))
    return is_asked & (not request.shape.has_straight_stream)


def _rows_are_sharded(request: Request, columns: Columns) -> Bools:
    return (columns.tp > 1) & (request.workload.optimizer == "adamw8bit")


def _tensor_stays_in_node(request: Request, columns: Columns) -> Bools:
    return (columns.tp > request.cluster.devices_per_node) & (not request.tp_may_leave_node)


RULES: tuple[Rule, ...] = (
    Rule(
        "heads",
        "attention heads must divide over tp",
        _heads_divide,
        lambda request, columns: f"tp may be {divisors(common(head_counts(request)))}",
    ),
    Rule(
        "key_value_heads",
        "key-value heads must divide over tp, or tp over them",
        _key_value_heads_divide,
        lambda request, columns: f"tp may be {divisors(common(head_counts(request)))}",
    ),
    Rule("widths", "the widths of MLPs and experts must divide over tp", _widths_divide),
    Rule("vocabulary", "the vocabulary has too few rows for tp", _vocabulary_suffices),
    Rule(
        "regions",
        "no part of the model can be sharded over tensor-parallel ranks",
        _something_is_sharded,
        lambda request, columns: "use mesh.tp = 1; ZeRO-3 (data_parallel.zero = 3) shards any model",
    ),
    Rule(
        "stream",
        "sequence parallel does not work with this family's blocks",
        _stream_is_straight,
        lambda request, columns: "set tensor_parallel.sequence_parallel = false",
    ),
    Rule(
        "float8_blocks",
        "shards over tp must be whole blocks of float8 scales",
        blocks_are_cut,
        lambda request, columns: "choose a smaller mesh.tp, or set float8.recipe = 'rowwise'",
    ),
    Rule(
        "full_rows",
        ROWS_ARE_SHARDED,
        _rows_are_sharded,
        lambda request, columns: "use train.optimizer = 'adamw', or mesh.tp = 1",
    ),
    Rule("node", "tensor parallelism stays inside a node", _tensor_stays_in_node),
)
