"""Legality of expert parallelism: experts that can be divided, one for every rank of ep at least, and ep divides the
ranks of its axes (`ExpertParallel.axis_names`).

Experts need not divide: ranks hold balanced spans of them (`core.shards.balanced_span`).
"""

from __future__ import annotations

from weft.core.model_shape import ModelShape
from weft.core.plan import ExpertParallel
from weft.plan.axis import Rule
from weft.plan.columns import EXPERT_TENSORS, Bools, Columns
from weft.plan.request import Request


def most_ranks(shape: ModelShape) -> int:
    """The experts of the block with the fewest; 1 for a dense model, and if experts cannot be divided."""
    return min((num_experts for num_experts, _ in shape.expert_layers), default=1) if not shape.whole_experts else 1


def check_experts(shape: ModelShape, ep: int) -> list[tuple[str, str]]:
    """Why the experts of a model cannot be divided over `ep` ranks, as (sentence, hint)."""
    most = most_ranks(shape)
    if ep <= most:
        return []
    if shape.whole_experts:
        sentence = (
            f"mesh.ep = {ep}, but the experts of {shape.name} cannot be divided over ranks: {shape.whole_experts}"
        )
        return [(sentence, "use mesh.ep = 1")]
    if not shape.expert_layers:
        return [(f"mesh.ep = {ep}, but {shape.name} has no experts", "use mesh.ep = 1")]
    return [(f"mesh.ep = {ep} is more than the {most} experts of {shape.name}", f"use mesh.ep of at most {most}")]


def _ranks_without_experts(request: Request, columns: Columns) -> Bools:
    return columns.ep > most_ranks(request.shape)


def _ranks_do_not_divide(request: Request, columns: Columns) -> Bools:
    return columns.expert_pool % columns.ep != 0


def _divisor_of_ranks(request: Request, columns: Columns) -> str:
    product = " x ".join(ExpertParallel(tensor=EXPERT_TENSORS[int(columns.expert_tensor[0])]).axis_names)
    return f"set mesh.ep to a divisor of {product} = {int(columns.expert_pool[0])}"


def _at_most(request: Request, columns: Columns) -> str:
    return next((hint for _, hint in check_experts(request.shape, int(columns.ep[0]))), "")


RULES: tuple[Rule, ...] = (
    Rule("experts", "ep must be at most the number of experts that can be divided", _ranks_without_experts, _at_most),
    Rule("expert_ranks", "ep must divide the ranks of its axes", _ranks_do_not_divide, _divisor_of_ranks),
)
