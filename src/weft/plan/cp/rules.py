"""Legality rules of context parallelism. Whether a family's rows can be divided is asked of its forward, in training
(`models/cp/probe.py`)."""

from __future__ import annotations

import numpy as np

from weft.core.model_shape import ModelShape
from weft.plan.axis import Rule, common, head_counts
from weft.plan.columns import CP_ATTENTIONS, TP_MODES, Bools, Columns
from weft.plan.request import Request

RING_DROPOUT = (
    "context_parallel.attention = 'ring' has no attention dropout: its masks are of whole rows of scores, which a ring"
    " never has"
)
GROUP_DROPOUT = "context_parallel.ulysses has no attention dropout: a rank has neither all heads nor all positions"
GROUP_DROPOUT_HINT = "set context_parallel.ulysses = 1, or the model's attention dropout to 0"
RING_DROPOUT_HINT = "set context_parallel.attention = 'gather', or the model's attention dropout to 0"


def _has_other_mixers(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & any(kind.attention is None for kind in request.shape.kinds)


def _drops_in_a_ring(request: Request, columns: Columns) -> Bools:
    is_ring = columns.cp_attention == CP_ATTENTIONS.index("ring")
    return (columns.cp > 1) & is_ring & drops_attention(request.shape)


def _drops_in_groups(request: Request, columns: Columns) -> Bools:
    return (columns.cp > 1) & (columns.cp_ulysses > 1) & drops_attention(request.shape)


def drops_attention(shape: ModelShape) -> bool:
    return any(kind.attention is not None and kind.attention.dropout > 0 for kind in shape.kinds)


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
        RING_DROPOUT,
        _drops_in_a_ring,
        lambda request, columns: RING_DROPOUT_HINT,
    ),
    Rule(
        "context_dropout_groups",
        GROUP_DROPOUT,
        _drops_in_groups,
        lambda request, columns: GROUP_DROPOUT_HINT,
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
