"""Sums of a step over the tokens of a router: choices per expert, probabilities per expert, the z-loss, drops.

    a row per layer: choices [experts], choices beyond the experts, probabilities [experts], squared log-sum-exps, drops

A recomputed forward adds nothing. The sum is an operator of its own: a compiled block must ask at run time whether it
is being recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.engine.activations.recomputing import is_recomputing


def row_size(num_experts: int) -> int:
    return 2 * num_experts + 3


def choices_of(row: Tensor, num_experts: int) -> Tensor:
    """Choices per expert of a row, or of rows."""
    return row[..., :num_experts]


def probabilities_of(row: Tensor, num_experts: int) -> Tensor:
    return row[..., num_experts + 1 : 2 * num_experts + 1]


def squares_of(row: Tensor, num_experts: int) -> Tensor:
    return row[..., 2 * num_experts + 1]


def drops_of(row: Tensor, num_experts: int) -> Tensor:
    """Choices beyond the capacity of their expert."""
    return row[..., 2 * num_experts + 2]


def add_choices(row: Tensor, index: Tensor, num_experts: int) -> None:
    """Add one per token and chosen expert; identity experts have indices beyond the others."""
    torch.ops.weft.add_choices(row, index.detach(), num_experts)


def add_scores(row: Tensor, scores: Tensor, num_experts: int) -> None:
    """Add `scores`: the summed probabilities of experts, and the summed squares."""
    torch.ops.weft.add_scores(row, scores.detach(), num_experts)


@torch.library.custom_op("weft::add_choices", mutates_args=("row",))
def _add_choices(row: Tensor, index: Tensor, num_experts: int) -> None:
    if not is_recomputing():
        chosen = index.reshape(-1).clamp(max=num_experts)
        row.scatter_add_(0, chosen.long(), row.new_ones(()).expand(chosen.shape))


@torch.library.custom_op("weft::add_scores", mutates_args=("row",))
def _add_scores(row: Tensor, scores: Tensor, num_experts: int) -> None:
    if not is_recomputing():
        row[num_experts + 1 : 2 * num_experts + 2].add_(scores)


@_add_choices.register_fake
def _(row: Tensor, index: Tensor, num_experts: int) -> None:
    return None


@_add_scores.register_fake
def _(row: Tensor, scores: Tensor, num_experts: int) -> None:
    return None
