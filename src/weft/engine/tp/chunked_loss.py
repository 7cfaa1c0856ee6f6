"""The loss of a chunk of logits of a vocabulary slice, which the gradient overwrites (see `head_loss`).

    m, s      over the ranks: the largest logsumexp of a slice, and the sum of exp(own logsumexp - m)
    loss    = m + log s - z[label]             x <- exp(z - m - log s) - onehot(label), times dz/dx

z are the logits x, scaled and capped. Ranks reduce three numbers per token, in two all-reduces per chunk: so ranks must
use the same chunks of rows for slices of any size. Float32 logits exist for a piece of a chunk at a time; on a GPU too,
where a fused kernel would save some passes over memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine import collectives
from weft.engine.kernels.cross_entropy import Cap
from weft.engine.objective import IGNORED
from weft.engine.tp.cross_entropy import at_place, outside, own_labels, pieces, wide


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    """This rank's slice of a head sharded by vocabulary: a `Slice` of `head_loss`."""

    first_token: int
    most_tokens: int  # of the largest slice: it decides the chunks
    group: dist.ProcessGroup

    def enter(self, hidden: Tensor) -> Tensor:
        """Replicated; its gradient is a partial sum on each rank."""
        return collectives.enter(hidden, self.group)

    def take_loss(self, logits: Tensor, labels: Tensor, cap: Cap, *, wants_gradient: bool) -> Tensor:
        """The summed loss in float32, equal on every rank; with `wants_gradient`, `logits` become the gradient."""
        place, is_here = own_labels(labels, self.first_token, logits.shape[-1])
        own, target = _log_sums(logits, place, cap)
        top = own.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        missing = outside(labels, self.first_token + logits.shape[-1], self.group)
        at_label = (target - top).masked_fill(~is_here, 0.0).masked_fill(missing, torch.nan)
        sums = torch.stack([(own - top).exp_(), at_label])
        dist.all_reduce(sums, group=self.group)
        counts = labels != IGNORED
        log_sum = sums[0].log_()
        loss = (log_sum - sums[1]).masked_fill(~counts, 0.0).sum().float()
        if wants_gradient:
            shares = (own - top - log_sum).exp_() * counts  # this slice's fraction of the full sum
            _write_gradients(logits, place, cap, shares=shares, ones=(is_here & counts).to(shares))
        return loss


def _log_sums(logits: Tensor, place: Tensor, cap: Cap) -> tuple[Tensor, Tensor]:
    """Per token: logsumexp of the local z, minus infinity for an empty slice; and z at `place`."""
    own = logits.new_full(logits.shape[:1], -torch.inf, dtype=wide(logits))
    target = torch.zeros_like(own)
    for part in pieces(logits):
        values = _capped(logits[part], cap)
        # the largest value's log-probability is minus the logarithm of the sum relative to it
        own[part] = values.amax(-1) - torch.log_softmax(values, -1, dtype=own.dtype).amax(-1)
        target[part] = at_place(values, place[part])
    return own, target


def _write_gradients(logits: Tensor, place: Tensor, cap: Cap, *, shares: Tensor, ones: Tensor) -> None:
    """The local softmax times the slice's fraction of the sum; minus one at labels of this slice."""
    for part in pieces(logits):
        values = _capped(logits[part], cap)
        gradient = torch.softmax(values, -1, dtype=shares.dtype).mul_(shares[part, None])
        gradient.scatter_add_(-1, place[part, None], -ones[part, None])
        if cap.is_capped:  # dz/dx of z = after tanh(before x); `values` are a copy
            gradient.mul_(values.div_(cap.after).square_().neg_().add_(1.0))
        if cap.before * cap.after != 1.0:
            gradient.mul_(cap.before * cap.after)
        logits[part].copy_(gradient)


def _capped(logits: Tensor, cap: Cap) -> Tensor:
    """z in float32, or the logits themselves if they equal z."""
    if not cap.is_capped and cap.before * cap.after == 1.0:
        return logits
    values = logits.to(wide(logits), copy=True).mul_(cap.before)
    return (values.tanh_() if cap.is_capped else values).mul_(cap.after)
