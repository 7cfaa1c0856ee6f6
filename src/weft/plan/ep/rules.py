"""Legality of expert parallelism: every rank of ep holds an expert, and ep divides dp_shard x cp x tp.

Experts need not divide: ranks hold balanced spans of them (`core.shards.balanced_span`).
"""

from __future__ import annotations

from weft.core.model_shape import ModelShape
from weft.plan.axis import Rule
from weft.plan.columns import Bools, Columns
from weft.plan.request import Request


def fewest_experts(shape: ModelShape) -> int:
    """The experts of the block with the fewest; 0 for a dense model."""
    return min((block.moe.num_experts for block in shape.kinds if block.moe is not None), default=0)


def check_experts(shape: ModelShape, ep: int) -> list[tuple[str, str]]:
    """Why the experts of a model cannot be divided over `ep` ranks, as (sentence, hint)."""
    experts = fewest_experts(shape)
    if ep <= max(1, experts):
        return []
    if not experts:
        return [(f"mesh.ep = {ep}, but {shape.name} has no experts", "use mesh.ep = 1")]
    sentence = f"mesh.ep = {ep} is more than the {experts} experts of {shape.name}"
    return [(sentence, f"use mesh.ep of at most {experts}")]


def _ranks_without_experts(request: Request, columns: Columns) -> Bools:
    return columns.ep > max(1, fewest_experts(request.shape))


def _ranks_do_not_divide(request: Request, columns: Columns) -> Bools:
    return (columns.dp_shard * columns.cp * columns.tp) % columns.ep != 0


def _at_most(request: Request, columns: Columns) -> str:
    return next((hint for _, hint in check_experts(request.shape, int(columns.ep[0]))), "")


RULES: tuple[Rule, ...] = (
    Rule("experts", "ep must be at most the number of experts", _ranks_without_experts, _at_most),
    Rule("expert_ranks", "ep must divide dp_shard x cp x tp", _ranks_do_not_divide),
)
