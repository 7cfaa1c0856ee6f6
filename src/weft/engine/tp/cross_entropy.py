"""The token loss of logits sharded by vocabulary. No rank ever holds the full logits.

    loss = log(sum_v exp(x_v - m)) - (x_label - m)          m: the largest logit of the full vocabulary

Ranks reduce three numbers per token: the maximum alone, then the sum and the label's logit together. The arithmetic is
that of `objective.token_loss_sum`, in float32; only the sum over the vocabulary is split. Tokens are processed in
chunks: logits and their gradient have the model's precision, and float32 exists for one chunk alone. Saved for the
backward: the logits and three numbers per token; the local softmax is scaled by the slice's fraction of the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.objective import IGNORED

CHUNK_ELEMENTS = 2**26  # 256 MiB in float32; smaller ones cost launches (a factor of two at 2**23 on an H200)


@dataclass(frozen=True, kw_only=True)
class VocabularyLoss:
    """The loss of `labels` (global ids), equal on every rank; `logits` are of tokens from `first_token` on.

    Slices are in the order of the group's ranks and may differ in size; the last may be empty.
    """

    first_token: int
    group: dist.ProcessGroup

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.of_tokens(logits, labels).sum().float()

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token, in the shape of the labels: one set of collectives for all rows."""
        flat = logits.flatten(0, -2)
        losses: Tensor = _VocabularyLoss.apply(flat, labels.flatten(), self.first_token, self.group)  # type: ignore[no-untyped-call]
        return losses.view(labels.shape)


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first_token: int, group: dist.ProcessGroup) -> Tensor:
        place, is_here = own_labels(labels, first_token, logits.shape[-1])
        own_top, own_log = _largest_and_log_sum(logits)
        top = own_top.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        own_log += own_top - top  # now the logarithm of this slice's term of the sum
        target = (at_place(logits, place) - top).masked_fill(~is_here, 0.0)
        target = target.masked_fill(outside(labels, first_token + logits.shape[-1], group), torch.nan)
        sums = torch.stack([own_log.exp(), target])
        dist.all_reduce(sums, group=group)
        log_sum, target = sums[0].log_(), sums[1]
        ctx.save_for_backward(logits, labels, top, log_sum, own_log)
        ctx.first_token = first_token
        return (log_sum - target).masked_fill_(labels == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, labels, top, log_sum, own_log = ctx.saved_tensors
        scale = torch.where(labels == IGNORED, torch.zeros_like(grad), grad)
        factor = (own_log - log_sum).exp_().mul_(scale).unsqueeze(-1)
        gradient = torch.empty_like(logits)
        for part in pieces(logits):
            torch.mul(_softmax(logits[part]), factor[part], out=gradient[part])
        if logits.shape[-1]:
            place, is_here = own_labels(labels, ctx.first_token, logits.shape[-1])
            # minus one at the label, in float32: subtracting from a rounded value would round twice
            hit = (at_place(logits, place) - top - log_sum).exp_().sub_(1.0).mul_(scale).to(logits.dtype)
            hit = torch.where(is_here, hit, at_place(gradient, place))
            gradient.scatter_(-1, place.unsqueeze(-1), hit.unsqueeze(-1))
        return gradient, None, None, None


def _largest_and_log_sum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: the largest local logit x_v, and log(sum exp(x_v - largest)); minus infinity for an empty slice."""
    top = logits.new_full(logits.shape[:1], -torch.inf, dtype=wide(logits))
    log_sum = torch.full_like(top, -torch.inf)
    for part in pieces(logits):
        top[part] = logits[part].amax(-1)
        # the largest logit's log-probability is minus the logarithm of the sum relative to it
        log_sum[part] = -torch.log_softmax(logits[part], -1, dtype=wide(logits)).amax(-1)
    return top, log_sum


def pieces(logits: Tensor) -> Iterator[slice]:
    """Chunks of tokens with about `CHUNK_ELEMENTS` logits; none if this rank's vocabulary is empty."""
    tokens, size = logits.shape
    step = max(1, CHUNK_ELEMENTS // max(size, 1))
    return (slice(at, min(at + step, tokens)) for at in range(0, tokens if size else 0, step))


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1, dtype=wide(logits))


def wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def own_labels(labels: Tensor, first_token: int, size: int) -> tuple[Tensor, Tensor]:
    """Each label's index in the slice (arbitrary for other ranks' labels), and whether it is in the slice."""
    place = labels - first_token
    is_here = (place >= 0) & (place < size)
    return place.clamp(0, max(size - 1, 0)), is_here


def at_place(values: Tensor, place: Tensor) -> Tensor:
    if not values.shape[-1]:
        return values.new_zeros(values.shape[:-1])
    return values.gather(-1, place.unsqueeze(-1)).squeeze(-1)


def outside(labels: Tensor, end: int, group: dist.ProcessGroup) -> Tensor:
    """Labels outside of the vocabulary. Else they would count as a logit of zero instead of failing the step."""
    rank, last = dist.get_rank(group), dist.get_world_size(group) - 1
    below = (labels < 0) & (labels != IGNORED) if rank == 0 else torch.zeros_like(labels, dtype=torch.bool)
    return below | (labels >= end) if rank == last else below
