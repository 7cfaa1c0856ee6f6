"""Capacity of experts: how many tokens of one sequence an expert computes in training.

    capacity = ceil(factor x tokens of the sequence x experts per token / experts)

An expert keeps its earliest tokens. The others are dropped: their weight is 0, the token's other weights do not change.
A sequence is a row of the batch, so a choice is dropped or kept alike at any number of ranks and micro-batches. The
largest weights would be another rule: it would let later tokens decide over earlier ones.

The choices of a recomputed forward are those of the first one (`activations/router_replay.py`), so its drops are too.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from weft.core.errors import ModelError
from weft.engine.activations.recomputing import is_recomputing
from weft.engine.router.sums import drops_of


def expert_capacity(factor: float, *, tokens: int, top_k: int, num_experts: int) -> int:
    """Exact: 1.1 x 10 tokens are 11, whatever floats make of it."""
    return math.ceil(Fraction(str(factor)) * tokens * top_k / num_experts)


def drop(
    weights: Tensor, index: Tensor, row: Tensor, *, factor: float, sequence_length: int, num_experts: int
) -> Tensor:
    """`weights` with zeros at choices over the capacity, which `row` counts."""
    kept = torch.ops.weft.keep_within(row, index.detach(), num_experts, factor, sequence_length)
    return weights.masked_fill(~kept, 0.0)


# an operator of its own: a compiled block must ask at run time whether it is being recomputed
@torch.library.custom_op("weft::keep_within", mutates_args=("row",))
def _keep_within(row: Tensor, index: Tensor, num_experts: int, factor: float, sequence_length: int) -> Tensor:
    if index.ndim != 2 or len(index) % sequence_length:
        raise ModelError(
            f"experts were called with choices {tuple(index.shape)} of sequences of {sequence_length} tokens",
            hint="router.capacity_factor needs [tokens, experts per token] of full sequences; set it to 0",
        )
    capacity = expert_capacity(factor, tokens=sequence_length, top_k=index.shape[1], num_experts=num_experts)
    # identity experts have indices beyond the others, and no capacity
    chosen = index.long().clamp(max=num_experts).view(-1, sequence_length, index.shape[1])
    is_chosen = torch.zeros(*chosen.shape[:2], num_experts + 1, dtype=torch.int32, device=index.device)
    place = is_chosen.scatter_(2, chosen, 1).cumsum(1, dtype=torch.int32).gather(2, chosen)
    kept = ((place <= capacity) | (chosen == num_experts)).view(index.shape)
    if not is_recomputing():
        drops_of(row, num_experts).add_((~kept).sum())
    return kept


@_keep_within.register_fake
def _(row: Tensor, index: Tensor, num_experts: int, factor: float, sequence_length: int) -> Tensor:
    return torch.empty_like(index, dtype=torch.bool)
