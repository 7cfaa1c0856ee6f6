"""Legality rules of context parallelism. Whether a family's rows can be divided is asked of its forward, in training
(`models/cp/probe.py`)."""

from __future__ import annotations

import numpy as np

from weft.plan.axis import Rule, common, head_counts
from weft.plan.columns import CP_ATTENTIONS, TP_MODES, Bools, Columns
from weft.plan.request import Request


def _has_other_mixers(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & any(kind.attention is None for kind in request.shape.kinds)


def _has_dropout(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & request.shape.has_dropout


def _is_beside_a_grid(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & (columns.tp > 1) & (columns.tp_mode != TP_MODES.index("1d"))


def _replicates_experts(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & (columns.ep > 1) & (columns.zero == 0)


def _heads_do_not_divide(request: Request, columns: Columns) -> Bools:
    counts = [kind.attention.num_heads for kind in request.shape.kinds if kind.attention is not None]
    uneven = [count % (columns.head_ranks * columns.tp) != 0 for count in counts]
    return (columns.head_ranks > 1) & np.any([np.zeros(len(columns), dtype=bool), *uneven], axis=0)


def _groups_do_not_divide(request: Request, columns: Columns) -> Bools:
    has_all = columns.cp_attention == CP_ATTENTIONS.index("ulysses")
    is_uneven = (columns.cp % columns.cp_ulysses != 0) | (columns.cp_ulysses >= columns.cp)
    return (columns.cp > 1) & (columns.cp_ulysses > 1) & (has_all | is_uneven)


RULES: tuple[Rule, ...] = (
    Rule(
        "context_mixers",
        "context parallelism needs attention in every block; others mix positions by a recurrence or a convolution",
        _has_other_mixers,
        lambda request, columns: "set mesh.cp = 1",
    ),
    Rule(
        "context_dropout",
        "context parallelism has no dropout yet, whose masks would differ from other layouts",
        _has_dropout,
        lambda request, columns: "set the model's dropout to 0 in [model.config], or mesh.cp = 1",
    ),
    Rule(
        "context_grid",
        "context parallelism works beside tensor_parallel.mode = '1d' alone",
        _is_beside_a_grid,
        lambda request, columns: "set tensor_parallel.mode = '1d'",
    ),
    Rule(
        "context_experts",
        "expert parallelism over context-parallel ranks needs sharded states",
        _replicates_experts,
        lambda request, columns: "set data_parallel.zero = 1, 2 or 3",
    ),
    Rule(
        "context_groups",
        "context_parallel.ulysses is a part of the ranks of mesh.cp, for attention = 'ring' or 'gather'",
        _groups_do_not_divide,
        lambda request, columns: "set context_parallel.ulysses to a divisor of mesh.cp below it, or to 1",
    ),
    Rule(
        "context_heads",
        "context-parallel ranks that exchange heads (ulysses) need heads that divide over them and over tensor ranks",
        _heads_do_not_divide,
        lambda request, columns: (
            f"heads: {common(head_counts(request))}; or use context_parallel.attention = 'gather' alone"
        ),
    ),
)
