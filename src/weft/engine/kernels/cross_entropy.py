"""Summed cross-entropy that overwrites the logits by their gradient: one read, one write, no second buffer.

    z = after * tanh(before * x)   where capped, else   z = before * after * x
    loss = sum over rows with a label of logsumexp(z) - z[label];   x <- softmax(z) - onehot(label), times dz/dx

One operator (`torch.ops.weft.cross_entropy_`) with two kernels: Triton on a GPU; plain torch elsewhere, a few rows at a
time, so that it needs no more memory than the other. A dry run calls neither: a fake kernel stands for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.engine.kernels.triton_here import has_triton
from weft.engine.objective import IGNORED

PIECE_ELEMENTS = 2**20  # logits in float32 at a time, without Triton


@dataclass(frozen=True)
class Cap:
    """A model's scale or soft cap of its logits: before * x, or after * tanh(before * x)."""

    before: float = 1.0
    after: float = 1.0
    is_capped: bool = False

    def then(self, name: str, *args: object) -> Cap | None:
        """With one more operation; None if the operation is no scale or cap."""
        if name == "tanh" and not args and not self.is_capped:
            return replace(self, is_capped=True)
        if name in ("mul", "multiply", "div", "divide", "true_divide") and len(args) == 1:
            (factor,) = args
            if type(factor) not in (int, float) or factor == 0 or not math.isfinite(factor):  # type: ignore[arg-type]
                return None
            factor = float(factor) if name.startswith("mul") else 1.0 / float(factor)  # type: ignore[arg-type]
            key = "after" if self.is_capped else "before"
            return replace(self, **{key: getattr(self, key) * factor})
        return None

    def of(self, logits: Tensor) -> Tensor:
        """Apply it to a tensor, with gradients."""
        if not self.is_capped:
            return logits if self.before * self.after == 1.0 else logits * (self.before * self.after)
        return torch.tanh(logits * self.before) * self.after


def cross_entropy_(logits: Tensor, labels: Tensor, cap: Cap, *, wants_gradient: bool) -> Tensor:
    """The summed loss in float32; with `wants_gradient`, `logits` [rows, vocabulary] become the gradient."""
    loss: Tensor = torch.ops.weft.cross_entropy_(logits, labels, cap.before, cap.after, cap.is_capped, wants_gradient)
    return loss


@torch.library.custom_op("weft::cross_entropy_", mutates_args=("logits",))
def _cross_entropy(
    logits: Tensor, labels: Tensor, before: float, after: float, is_capped: bool, wants_gradient: bool
) -> Tensor:
    cap = Cap(before, after, is_capped)
    if logits.is_cuda and has_triton():
        from weft.engine.kernels.cross_entropy_triton import launch

        return launch(logits, labels, cap, wants_gradient=wants_gradient)
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    rows = max(1, PIECE_ELEMENTS // logits.shape[-1])
    for piece, its_labels in zip(torch.split(logits, rows), torch.split(labels, rows), strict=True):
        loss += _piece(piece, its_labels, cap, wants_gradient=wants_gradient)
    return loss


@_cross_entropy.register_fake
def _(logits: Tensor, *_given: object) -> Tensor:
    return logits.new_empty((), dtype=torch.float32)


def _piece(logits: Tensor, labels: Tensor, cap: Cap, *, wants_gradient: bool) -> Tensor:
    counts = labels != IGNORED
    index = labels.clamp(min=0)[:, None]
    bent = torch.tanh(logits.float() * cap.before) if cap.is_capped else logits.float() * cap.before
    values = bent * cap.after
    peaks = torch.logsumexp(values, dim=-1, keepdim=True)
    loss = ((peaks - values.gather(1, index)).squeeze(1) * counts).sum()
    if wants_gradient:
        gradient = torch.exp(values - peaks)
        gradient.scatter_add_(1, index, torch.full_like(peaks, -1.0))
        slope = (1.0 - bent.square()) * (cap.before * cap.after) if cap.is_capped else cap.before * cap.after
        logits.copy_(gradient * slope * counts[:, None])
    return loss
