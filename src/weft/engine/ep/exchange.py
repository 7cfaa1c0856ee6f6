"""Exchanges of rows with gradients. The backward sends gradients the way back, with the counts swapped.

| begin           | forward                                           | backward                            |
| --------------- | ------------------------------------------------- | ----------------------------------- |
| `begin_tokens`  | all-to-all of the tokens of an order              | all-to-all                          |
| `begin_rows`    | all-to-all of rows, the way back                  | all-to-all                          |
| `begin_gather`  | all-gather of all tokens                          | reduce-scatter                      |
| `begin_scatter` | reduce-scatter of rows, the way back              | all-gather                          |
| `send_routing`  | all-to-all of the experts and weights of each row | all-to-all of weights; no overlap   |

`finish` waits for what was begun; in the backward it begins, and the node of `begin_*` waits.

Tokens travel in the format of the wire, gradients as computed. Work between begin and finish overlaps the exchange, and
so does its backward: autograd runs the operators of a backward in reverse order. Every rank calls every exchange, with
no rows too, so all ranks have the same collectives in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.experts import WireFormat
from weft.engine import collectives
from weft.engine.collectives import PendingCollective
from weft.engine.ep.rows import RowOrder, add_slots
from weft.engine.ep.wire import E4M3, packed, unpacked
from weft.engine.measure.seen import seen

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
    return begin_exchange(rows, counts, group).wait()


def begin_exchange(rows: Tensor, counts: Counts, group: Group) -> PendingCollective:
    rows = rows.contiguous()
    received = rows.new_empty((sum(counts.received), *rows.shape[1:]))
    sizes = list(counts.received), list(counts.sent)
    return PendingCollective(received, rows, dist.all_to_all_single(received, rows, *sizes, group=group, async_op=True))


def exchange_counts(counts: Tensor, group: Group) -> Tensor:
    """Row r of the result is what rank r has in the row of this rank."""
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts.contiguous(), group=group)
    return theirs


def send_routing(experts: Tensor, weights: Tensor, counts: Counts, group: Group) -> tuple[Tensor, Tensor]:
    """Send the `experts` [rows, k] and `weights` [rows, k] of rows."""
    return _SendRouting.apply(weights, experts, counts, group)  # type: ignore[no-any-return, no-untyped-call]


def begin_tokens(tokens: Tensor, order: RowOrder, counts: Counts, group: Group, wire: WireFormat) -> PendingExchange:
    """Send the tokens of `order`'s rows."""
    return _begin(tokens, order, _ToRanks(group, wire, counts))


def begin_rows(rows: Tensor, counts: Counts, group: Group) -> PendingExchange:
    return _begin(rows, None, _ToRanks(group, "activations", counts, is_back=True))


def begin_gather(tokens: Tensor, group: Group, wire: WireFormat) -> PendingExchange:
    """Send all tokens to all ranks."""
    return _begin(tokens, None, _ToAll(group, wire))


def begin_scatter(rows: Tensor, group: Group) -> PendingExchange:
    """Add up the rows of all ranks, and keep this rank's."""
    return _begin(rows, None, _FromAll(group, "activations", is_back=True))


def finish(begun: PendingExchange) -> Tensor:
    """What arrived."""
    return _Finish.apply(*begun)  # type: ignore[no-any-return, no-untyped-call]


class PendingExchange(NamedTuple):
    """`link`: a tensor without elements, through which autograd orders the two ends of the exchange."""

    link: Tensor
    way: _Exchange


class _Exchange:
    """One way of rows, and of their gradients back. It holds no tensors but those that travel."""

    def __init__(self, group: Group, wire: WireFormat, *, is_back: bool = False) -> None:
        self.group, self.wire = group, wire
        self._component = "combine" if is_back else "dispatch"  # of core.precision
        self._width, self._dtype = 0, torch.float32
        self._pending: PendingCollective | None = None

    def start_forward(self, tokens: Tensor, order: RowOrder | None) -> None:
        self._width, self._dtype = tokens.shape[1], tokens.dtype
        sent = packed(tokens, self.wire)
        seen(self._component, E4M3 if sent.dtype == torch.int32 else sent.dtype)  # words hold float8 alone
        self._pending = self._forward_collective(sent, order)

    def wait_forward(self) -> Tensor:
        return unpacked(self._arrived(), self.wire, self._width, self._dtype)

    def start_backward(self, gradient: Tensor) -> None:
        seen("combine", gradient.dtype)
        self._pending = self._backward_collective(gradient)

    def wait_backward(self, *rows: Tensor) -> Tensor:
        """The gradients of tokens. `rows`: of the order, if some tokens were taken."""
        arrived = self._arrived()
        return add_slots(arrived, *rows) if rows else arrived

    def _arrived(self) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None, "no collective is pending"
        return pending.wait()

    def _forward_collective(self, tokens: Tensor, order: RowOrder | None) -> PendingCollective:
        raise NotImplementedError

    def _backward_collective(self, gradient: Tensor) -> PendingCollective:
        raise NotImplementedError


class _ToRanks(_Exchange):
    def __init__(self, group: Group, wire: WireFormat, counts: Counts, *, is_back: bool = False) -> None:
        super().__init__(group, wire, is_back=is_back)
        self._counts = counts

    def _forward_collective(self, tokens: Tensor, order: RowOrder | None) -> PendingCollective:
        rows = tokens if order is None else tokens.index_select(0, order.tokens)
        return begin_exchange(rows, self._counts, self.group)

    def _backward_collective(self, gradient: Tensor) -> PendingCollective:
        return begin_exchange(gradient, self._counts.back, self.group)


class _ToAll(_Exchange):
    def _forward_collective(self, tokens: Tensor, order: RowOrder | None) -> PendingCollective:
        return collectives.begin_gathered(tokens, self.group)

    def _backward_collective(self, gradient: Tensor) -> PendingCollective:
        return collectives.begin_scattered(gradient, self.group)


class _FromAll(_Exchange):
    def _forward_collective(self, tokens: Tensor, order: RowOrder | None) -> PendingCollective:
        return collectives.begin_scattered(tokens, self.group)

    def _backward_collective(self, gradient: Tensor) -> PendingCollective:
        return collectives.begin_gathered(gradient, self.group)


def _begin(tokens: Tensor, order: RowOrder | None, way: _Exchange) -> PendingExchange:
    return PendingExchange(_Begin.apply(tokens, order, way), way)  # type: ignore[no-untyped-call]


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: RowOrder | None, way: _Exchange) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(*(() if order is None else (order.rows,)))
        way.start_forward(tokens, order)
        return tokens.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _link: Tensor) -> Any:
        return ctx.way.wait_backward(*ctx.saved_tensors), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor, way: _Exchange) -> Tensor:
        ctx.way = way
        return way.wait_forward()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.way.start_backward(gradient)
        return gradient.new_empty(0), None


class _SendRouting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, experts: Tensor, counts: Counts, group: Group) -> Any:
        ctx.back, ctx.group = counts.back, group
        # numbers of experts are exact in float32; in a lower dtype of weights they would not be
        wide = torch.promote_types(weights.dtype, torch.float32)
        routing = exchange(torch.cat([weights.to(wide), experts.to(wide)], dim=1), counts, group)
        own_weights, own_experts = routing.chunk(2, dim=1)
        own_experts = own_experts.long()
        ctx.mark_non_differentiable(own_experts)
        return own_experts, own_weights.to(weights.dtype)

    @staticmethod
    def backward(ctx: Any, _experts: Tensor, weights: Tensor) -> Any:
        return exchange(weights, ctx.back, ctx.group), None, None, None
