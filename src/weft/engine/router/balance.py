"""The losses of a router, attached to the weights that its experts get.

    balance   coefficient x experts x sum over e of f_e P_e    f: share of choices, P: mean probability
    z         coefficient x mean over tokens of logsumexp(logits)^2

Means are over all tokens that the router saw in the global batch, padding included. f has no gradient. In the gradient
it is that of the previous step's global batch: so a step needs no second forward, and its gradient is the same in every
layout. The first step has a uniform f, whose gradient is zero.

`balance_over = "transformers"` has f and P of the micro-batch and all layers at once, as transformers' own loss:

    coefficient x experts x sum over e of (choices_e / rows) (probabilities_e / rows)    rows: tokens x layers

The term is a sum over this forward's tokens, added to the stream by `attach`: its gradient is the constant `scale`,
which has the division by the global token count and the loss scale. Pipelines, recompute and split backwards carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.models.ep.routers import Scoring


def probabilities(logits: Tensor, scoring: Scoring) -> Tensor:
    """Per token, with sum one; in float32 or better. Sigmoid scores are normalised over all experts."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scoring == "softmax":
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def squared_log_sums(logits: Tensor) -> Tensor:
    """Per token."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.logsumexp(-1).square()


def attach(carrier: Tensor, term: Tensor, scale: Tensor) -> Tensor:
    """`carrier`, whose backward gives `term` the gradient `scale`."""
    attached: Tensor = _Attached.apply(carrier, term, scale)  # type: ignore[no-untyped-call]
    return attached


def attach_late(carrier: Tensor, term: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
    """`carrier`, whose backward gives `term` the gradient that is known then: later layers may decide on it."""
    attached: Tensor = _AttachedLate.apply(carrier, term, gradient)  # type: ignore[no-untyped-call]
    return attached


class _AttachedLate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, term: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, term.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.gradient().to(ctx.dtype), None


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, term: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = term.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grads[0], scale.to(ctx.dtype), None
