"""What makes data parallelism legal: shards belong to a ZeRO stage."""

from __future__ import annotations

from weft.plan.axis import Rule
from weft.plan.columns import Bools, Columns
from weft.plan.request import Request


def _zero_matches_mesh(request: Request, columns: Columns) -> Bools:
    return (columns.zero == 0) & (columns.dp_shard > 1)


RULES: tuple[Rule, ...] = (Rule("zero", "shards want a ZeRO stage", _zero_matches_mesh),)
