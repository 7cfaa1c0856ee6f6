"""Rounding of a loss that is fused with its head, in plain operators: the model's operations on logits run in float32,
the gradient of the summed loss goes through the head, and its result is divided by the token count (and multiplied by a
loss scale) in float32 and then rounded.

The order matters in a fresh model: all its labels have about the same gradient, -1, so one rounding error is common to
all gradients, up to 0.2% in bfloat16, and it is a different one after a division.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from weft.engine.kernels.head_loss import find_head, fuse_loss


class LateDivision:
    """Wraps the head of a model; set `scale` before each backward of a summed loss."""

    def __init__(self, model: nn.Module) -> None:
        head, _ = find_head(model)
        assert head is not None, "a fused loss needs a model with a head"
        self._head, self.scale = head, 1.0
        head.forward = self._forward  # type: ignore[method-assign, assignment]

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, bias = self._head.weight, self._head.bias
        logits = F.linear(self._late(hidden), self._late(weight), None if bias is None else self._late(bias))
        return logits.float()

    def _late(self, value: torch.Tensor) -> torch.Tensor:
        """`value`, with the head's contribution to its gradient scaled."""
        seen = value.view_as(value)
        if seen.requires_grad:
            seen.register_hook(self._scaled)  # type: ignore[no-untyped-call]
        return seen

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return (gradient.float() * self.scale).to(gradient.dtype)


@torch.no_grad()
def is_fused(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether an engine can fuse the loss of this model: the code of some models needs the full logits."""
    fused, _ = fuse_loss(model.eval(), is_asked=True)
    if fused is None:
        return False
    device = next(model.parameters()).device
    row = {key: value[:1].to(device) for key, value in batch.items()}
    labels = row.pop("labels")
    with fused.given(labels):
        model(**row, use_cache=False)
    return not fused.full_logits_cause
