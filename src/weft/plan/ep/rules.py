"""Legality of expert parallelism: experts divide over ep, and ep over dp_shard x cp x tp."""

from __future__ import annotations

from weft.plan.axis import Rule
from weft.plan.columns import Bools, Columns
from weft.plan.request import Request


def _experts_divide(request: Request, columns: Columns) -> Bools:
    experts = {block.moe.num_experts for block in request.shape.kinds if block.moe is not None}
    if not experts:
        return columns.ep > 1
    broken = (columns.dp_shard * columns.cp * columns.tp) % columns.ep != 0
    for count in experts:
        broken |= count % columns.ep != 0
    return broken


RULES: tuple[Rule, ...] = (
    Rule("experts", "experts must divide over ep, and ep over dp_shard x cp x tp", _experts_divide),
)
