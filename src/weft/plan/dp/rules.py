"""Legality of data parallelism: dp_shard needs a ZeRO stage, a secondary shard smaller groups of its ranks."""

from __future__ import annotations

import numpy as np

from weft.core.secondary import check_secondary
from weft.core.wire_bytes import CODED
from weft.plan.axis import Rule
from weft.plan.columns import Bools, Columns
from weft.plan.request import Request


def _zero_matches_mesh(request: Request, columns: Columns) -> Bools:
    return (columns.zero == 0) & (columns.dp_shard > 1)


def _secondary_divides(_request: Request, columns: Columns) -> Bools:
    facts = np.stack([columns.secondary_shard, columns.zero, columns.shards], axis=1)
    found, which = np.unique(facts, axis=0, return_inverse=True)
    broken = [any(check_secondary(int(size), zero=int(zero), shards=int(shards))) for size, zero, shards in found]
    return np.asarray(broken, dtype=np.bool_)[which.reshape(-1)]


def _neighbours_divide(request: Request, columns: Columns) -> Bools:
    near, ranks, is_coded = columns.reduce_neighbours, columns.reducing, request.precision.has_coded_sums
    is_group = (near > 1) & (near < ranks) & (ranks % np.maximum(near, 1) == 0)
    return np.asarray((near > 0) & ~(is_group & is_coded & (columns.ep == 1)))


def _secondary_is_executed(_request: Request, columns: Columns) -> Bools:
    return (columns.secondary_shard > 0) & ((columns.pp > 1) | (columns.ep > 1))


def _errors_are_executed(_request: Request, columns: Columns) -> Bools:
    in_parts = (columns.pp > 1) & (columns.zero > 1) & columns.is_v_shaped
    return (columns.error_feedback > 0) & (in_parts | columns.is_grid)


def _copies_round_alike(request: Request, columns: Columns) -> Bools:
    policy = request.precision
    has_coded_gathers = (columns.zero > 0) & (columns.float8 == 0) & (policy.gather in CODED)
    return np.asarray(columns.is_grid & (has_coded_gathers | (policy.reduce in CODED)))


RULES: tuple[Rule, ...] = (
    Rule("zero", "mesh.dp_shard > 1 needs a ZeRO stage", _zero_matches_mesh),
    Rule(
        "secondary_shard",
        "data_parallel.secondary_shard needs zero = 3 and more than one group among dp_shard x cp",
        _secondary_divides,
    ),
    Rule(
        "secondary_layout",
        "data_parallel.secondary_shard is not executed with pipelines or expert parallelism",
        _secondary_is_executed,
    ),
    Rule(
        "reduce_neighbours",
        "data_parallel.reduce_neighbours needs precision.reduce in a lower format, more than one group of reducing "
        "ranks, and ep = 1",
        _neighbours_divide,
    ),
    Rule(
        "coded_copies",
        "precision.reduce and precision.gather in 8 bits are not executed with tp over a grid, whose copies of a "
        "parameter would drift apart",
        _copies_round_alike,
        lambda request, columns: "set precision.reduce = 'bfloat16', and remove precision.gather",
    ),
    Rule(
        "error_feedback",
        "data_parallel.error_feedback is not executed with tp over a grid, nor with ZeRO-2 and 3 in a pipeline "
        "whose first rank has the last stage too",
        _errors_are_executed,
    ),
)
