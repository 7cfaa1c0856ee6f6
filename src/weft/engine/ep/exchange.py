"""All-to-all exchanges of rows with gradients. The backward sends gradients the way back, with the counts swapped.

| function        | forward                                                            | backward               |
| --------------- | ------------------------------------------------------------------ | ---------------------- |
| `send_rows`     | one all-to-all                                                     | one all-to-all         |
| `send_routed`   | rows; then experts and weights of each row in one tensor           | of rows, then weights  |

Every rank calls every exchange, with no rows too: both directions of `send_routed` are one autograd node, so that all
ranks have the same collectives in the same order whatever they received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Rows that this rank sends to and receives from each rank of the group, in order."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> Counts:
        return Counts(sent=self.received, received=self.sent)


def exchange(rows: Tensor, counts: Counts, group: Group) -> Tensor:
    """The rows that all ranks of the group sent to this one, in rank order; without a gradient."""
    received = rows.new_empty((sum(counts.received), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(counts.received), list(counts.sent), group=group)
    return received


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """Row r of the result is what rank r has in the row of this rank."""
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    return theirs


def send_rows(rows: Tensor, counts: Counts, group: Group) -> Tensor:
    return _SendRows.apply(rows, counts, group)  # type: ignore[no-any-return, no-untyped-call]


def send_routed(
    rows: Tensor, experts: Tensor, weights: Tensor, counts: Counts, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Send rows with their `experts` [rows, k] and `weights` [rows, k]."""
    return _SendRouted.apply(rows, weights, experts, counts, group)  # type: ignore[no-any-return, no-untyped-call]


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts, group: Group) -> Tensor:
        ctx.back, ctx.group = counts.back, group
        return exchange(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, ctx.back, ctx.group), None, None


class _SendRouted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, experts: Tensor, counts: Counts, group: Group) -> Any:
        ctx.back, ctx.group = counts.back, group
        # numbers of experts are exact in float32; in a lower dtype of weights they would not be
        wire = torch.promote_types(weights.dtype, torch.float32)
        received = exchange(rows, counts, group)
        routing = exchange(torch.cat([weights.to(wire), experts.to(wire)], dim=1), counts, group)
        own_weights, own_experts = routing.chunk(2, dim=1)
        own_experts = own_experts.long()
        ctx.mark_non_differentiable(own_experts)
        return received, own_experts, own_weights.to(weights.dtype)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _experts: Tensor, weights: Tensor) -> Any:
        # needed by all ranks or by none: the same modules are trained everywhere
        of_rows = exchange(rows, ctx.back, ctx.group) if ctx.needs_input_grad[0] else None
        of_weights = exchange(weights, ctx.back, ctx.group) if ctx.needs_input_grad[1] else None
        return of_rows, of_weights, None, None, None
