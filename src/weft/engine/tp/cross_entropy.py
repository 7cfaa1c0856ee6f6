"""The token loss where each rank has the logits of a part of the vocabulary. No rank ever holds all of them.

    loss = log(sum_v exp(x_v - m)) - (x_label - m)          m: the largest logit of the whole vocabulary

Three numbers a token cross the ranks: the maximum alone, then the sum and the label's logit together. The same order of
operations as `objective.token_loss_sum`, in float32; only the sum over the vocabulary is split. What is kept for the
backward is the logits in their own precision and two numbers a token; the softmax is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.objective import IGNORED


def vocabulary_loss_sum(logits: Tensor, labels: Tensor, *, first_token: int, group: dist.ProcessGroup) -> Tensor:
    """The summed loss of `labels` (whole ids), alike on every rank; `logits` are of tokens `first_token` and on.

    The group's slices follow each other in its order of ranks and may differ in size; the last may be empty.
    """
    flat = logits.flatten(0, -2)
    return _VocabularyLoss.apply(flat, labels.flatten(), first_token, group)  # type: ignore[no-any-return, no-untyped-call]


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first_token: int, group: dist.ProcessGroup) -> Tensor:
        shifted, top = _less_the_largest(logits.float(), group)
        place, is_here = _own_labels(labels, first_token, logits.shape[-1])
        target = _at(shifted, place).masked_fill(~is_here, 0.0)
        target = target.masked_fill(_outside(labels, first_token + logits.shape[-1], group), torch.nan)
        sums = torch.stack([shifted.exp_().sum(-1), target])
        dist.all_reduce(sums, group=group)
        log_sum, target = sums[0].log_(), sums[1]
        ctx.save_for_backward(logits, labels, top, log_sum)
        ctx.first_token = first_token
        return (log_sum - target).masked_fill_(labels == IGNORED, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, top, log_sum = ctx.saved_tensors
        place, is_here = _own_labels(labels, ctx.first_token, logits.shape[-1])
        found = logits.float() - top.unsqueeze(-1)
        found = found.sub_(log_sum.unsqueeze(-1)).exp_()
        if found.shape[-1]:
            found.scatter_add_(-1, place.unsqueeze(-1), -is_here.to(found.dtype).unsqueeze(-1))
        found.mul_(torch.where(labels == IGNORED, torch.zeros_like(grad), grad).unsqueeze(-1))
        return found.to(logits.dtype), None, None, None


def _less_the_largest(logits: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """The logits less the largest of the whole vocabulary, a new tensor, and that largest."""
    if logits.shape[-1]:
        top = logits.amax(-1)
    else:
        top = logits.new_full(logits.shape[:-1], -torch.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    return logits - top.unsqueeze(-1), top


def _own_labels(labels: Tensor, first_token: int, size: int) -> tuple[Tensor, Tensor]:
    """Where each label lies in the slice (anywhere, if it does not), and whether it does."""
    place = labels - first_token
    is_here = (place >= 0) & (place < size)
    return place.clamp(0, max(size - 1, 0)), is_here


def _at(values: Tensor, place: Tensor) -> Tensor:
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return values.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def _outside(labels: Tensor, end: int, group: dist.ProcessGroup) -> Tensor:
    """Labels that no rank has. Without this they would count as a logit of zero instead of failing the step."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    below = (labels < 0) & (labels != IGNORED) if rank == 0 else torch.zeros_like(labels, dtype=torch.bool)
    return below | (labels >= end) if rank == last else below
