"""All-to-all exchanges of rows with gradients. The backward sends gradients the way back, with the counts swapped.

| function             | forward                                                            | backward               |
| -------------------- | ------------------------------------------------------------------ | ---------------------- |
| `send_rows`          | one all-to-all                                                     | one all-to-all         |
| `send_tokens`        | of the tokens that an order takes, in the format of the wire       | of rows, as computed   |
| `send_tokens_routed` | the same; then experts and weights of each row in one tensor       | of rows, then weights  |
| `gather_tokens`      | one all-gather, in the format of the wire                          | one reduce-scatter     |

Every rank calls every exchange, with no rows too: both of `send_tokens_routed` are one autograd node, so that all ranks
have the same collectives in the same order whatever they received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.experts import WireFormat
from weft.engine import collectives
from weft.engine.ep.rows import RowOrder, add_slots
from weft.engine.ep.wire import packed, unpacked

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


def send_tokens(tokens: Tensor, order: RowOrder, counts: Counts, group: Group, wire: WireFormat) -> Tensor:
    """Send the tokens of `order`'s rows."""
    return _SendTokens.apply(tokens, order, _Way(counts, group, wire))  # type: ignore[no-any-return, no-untyped-call]


def send_tokens_routed(
    tokens: Tensor, order: RowOrder, experts: Tensor, weights: Tensor, counts: Counts, group: Group, wire: WireFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """Send the tokens of `order`'s rows with their `experts` [rows, k] and `weights` [rows, k]."""
    way = _Way(counts, group, wire)
    return _SendTokensRouted.apply(tokens, weights, order, experts, way)  # type: ignore[no-any-return, no-untyped-call]


def gather_tokens(tokens: Tensor, group: Group, wire: WireFormat) -> Tensor:
    def gathered(rows: Tensor, group: Group, dim: int) -> Tensor:
        return unpacked(collectives.gathered(packed(rows, wire), group, dim), wire, rows)

    return collectives.move(tokens, group, 0, gathered, collectives.scattered)


class _Way(NamedTuple):
    """How tokens reach the ranks of their experts, and how the gradients of their rows return."""

    counts: Counts
    group: Group
    wire: WireFormat

    def there(self, tokens: Tensor, order: RowOrder) -> Tensor:
        sent = packed(tokens, self.wire).index_select(0, order.tokens)
        return unpacked(exchange(sent, self.counts, self.group), self.wire, tokens)

    def back(self, gradient: Tensor, rows: Tensor) -> Tensor:
        """The sum over the slots of each token; `rows` are those of the order."""
        return add_slots(exchange(gradient, self.counts.back, self.group), rows)  # type: ignore[no-any-return]


class _SendRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Counts, group: Group) -> Tensor:
        ctx.back, ctx.group = counts.back, group
        return exchange(rows, counts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange(gradient, ctx.back, ctx.group), None, None


class _SendTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: RowOrder, way: _Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(order.rows)
        return way.there(tokens, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.way.back(gradient, *ctx.saved_tensors), None, None


class _SendTokensRouted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, order: RowOrder, experts: Tensor, way: _Way) -> Any:
        ctx.way = way
        ctx.save_for_backward(order.rows)
        # numbers of experts are exact in float32; in a lower dtype of weights they would not be
        wide = torch.promote_types(weights.dtype, torch.float32)
        received = way.there(tokens, order)
        routing = exchange(torch.cat([weights.to(wide), experts.to(wide)], dim=1), way.counts, way.group)
        own_weights, own_experts = routing.chunk(2, dim=1)
        own_experts = own_experts.long()
        ctx.mark_non_differentiable(own_experts)
        return received, own_experts, own_weights.to(weights.dtype)

    @staticmethod
    def backward(ctx: Any, rows: Tensor, _experts: Tensor, weights: Tensor) -> Any:
        # needed by all ranks or by none: the same modules are trained everywhere
        way: _Way = ctx.way
        of_tokens = way.back(rows, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
        of_weights = exchange(weights, way.counts.back, way.group) if ctx.needs_input_grad[1] else None
        return of_tokens, of_weights, None, None, None
