"""Exchanges of keys and values between context-parallel ranks, with gradients.

| exchange  | forward                                                  | backward                                     |
| --------- | -------------------------------------------------------- | -------------------------------------------- |
| `gather`  | all-gather of positions                                  | reduce-scatter of their gradients            |
| `to_heads`| all-to-all: own positions -> all positions, own heads    | all-to-all, the way back                     |
| `to_rows` | the way back                                             | all-to-all                                   |

`begin_hop` has no gradient: `engine/cp/ring.py` passes keys, values and their gradients on by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.engine.collectives import PendingCollective, begin_gathered, begin_scattered
from weft.engine.cp.positions import Positions

Group = dist.ProcessGroup

HEADS, POSITIONS = 1, 2  # dimensions of [rows, heads, positions, width]


def gather(key: Tensor, value: Tensor, positions: Positions, group: Group) -> tuple[Tensor, Tensor]:
    """Keys and values of whole rows."""
    return _Gather.apply(key, value, positions, group)  # type: ignore[no-any-return, no-untyped-call]


def begin_whole(own: Tensor, group: Group) -> PendingCollective:
    return begin_gathered(own.unsqueeze(0), group)


def finish_whole(pending: PendingCollective, positions: Positions, dim: int) -> Tensor:
    return positions.in_order(pending.wait().unbind(0), dim)


def to_heads(x: Tensor, positions: Positions, group: Group) -> Tensor:
    """From this rank's positions with all heads to all positions with a share of the heads."""
    return _ToHeads.apply(x, positions, group)  # type: ignore[no-any-return, no-untyped-call]


def to_rows(x: Tensor, positions: Positions, group: Group) -> Tensor:
    """The way back of `to_heads`."""
    return _ToRows.apply(x, positions, group)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class PendingHop:
    """A message from the rank before that is still arriving."""

    received: Tensor
    sent: Tensor  # must outlive its way
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def begin_hop(message: Tensor, group: Group) -> PendingHop:
    """Send `message` to the next rank of the ring. Both directions are posted together: no order of ranks can block."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(message)
    ways = [
        dist.P2POp(dist.isend, message, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
    ]
    return PendingHop(received, message, dist.batch_isend_irecv(ways))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, positions: Positions, group: Group) -> Any:
        ctx.positions, ctx.group = positions, group
        pending = [begin_whole(own, group) for own in (key, value)]
        return tuple(finish_whole(each, positions, POSITIONS) for each in pending)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        by_rank = [ctx.positions.by_rank(whole, POSITIONS) for whole in gradients]
        pending = [begin_scattered(each, ctx.group) for each in by_rank]
        return (*(each.wait().squeeze(0) for each in pending), None, None)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Positions, group: Group) -> Tensor:
        ctx.positions, ctx.group = positions, group
        return _heads_of(x, positions, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _rows_of(gradient, ctx.positions, ctx.group), None, None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Positions, group: Group) -> Tensor:
        ctx.positions, ctx.group = positions, group
        return _rows_of(x, positions, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _heads_of(gradient, ctx.positions, ctx.group), None, None


def _heads_of(x: Tensor, positions: Positions, group: Group) -> Tensor:
    return positions.in_order(_exchanged(torch.stack(x.chunk(positions.degree, HEADS)), group).unbind(0), POSITIONS)


def _rows_of(x: Tensor, positions: Positions, group: Group) -> Tensor:
    return torch.cat(_exchanged(positions.by_rank(x, POSITIONS), group).unbind(0), HEADS)


def _exchanged(by_rank: Tensor, group: Group) -> Tensor:
    """Slice r of the result is what rank r has in the slice of this rank."""
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received.view(-1), by_rank.view(-1), group=group)
    return received
