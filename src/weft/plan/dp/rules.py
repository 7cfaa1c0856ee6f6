"""Legality of data parallelism: dp_shard needs a ZeRO stage."""

from __future__ import annotations

from weft.plan.axis import Rule
from weft.plan.columns import Bools, Columns
from weft.plan.request import Request


def _zero_matches_mesh(request: Request, columns: Columns) -> Bools:
    return (columns.zero == 0) & (columns.dp_shard > 1)


RULES: tuple[Rule, ...] = (Rule("zero", "mesh.dp_shard > 1 needs a ZeRO stage", _zero_matches_mesh),)
