"""Collectives with gradients between replicated, sharded and partial tensors. All tensors are plain local ones.

| forward                    | backward                      |                                                        |
| -------------------------- | ----------------------------- | ------------------------------------------------------ |
| `enter`: identity          | all-reduce                    | a replicated input of sharded work                     |
| `leave`: all-reduce        | identity                      | partial sums to a replicated tensor                    |
| `gather`: all-gather       | reduce-scatter                | shards to the full input of work sharded otherwise     |
| `scatter`: reduce-scatter  | all-gather                    | partial sums to shards                                 |
| `take`: local slice        | all-gather                    | a replicated tensor to shards                          |
| `collect`: all-gather      | local slice                   | shards to the full input of work that ranks repeat     |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup
Move = Callable[[Tensor, Group, int], Tensor]

# torch 2.13 renames them and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingCollective(NamedTuple):
    """A tensor that a collective still writes."""

    received: Tensor
    sent: Tensor  # must outlive the collective
    work: Any

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


def enter(x: Tensor, group: Group) -> Tensor:
    return _Enter.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, group: Group) -> Tensor:
    return _Leave.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: Tensor, group: Group, dim: int) -> Tensor:
    return _Moved.apply(x, group, dim, gathered, scattered)  # type: ignore[no-any-return, no-untyped-call]


def scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    return _Moved.apply(x, group, dim, scattered, gathered)  # type: ignore[no-any-return, no-untyped-call]


def take(x: Tensor, group: Group, dim: int) -> Tensor:
    return _Moved.apply(x, group, dim, contiguous_slice, gathered)  # type: ignore[no-any-return, no-untyped-call]


def collect(x: Tensor, group: Group, dim: int) -> Tensor:
    return _Moved.apply(x, group, dim, gathered, contiguous_slice)  # type: ignore[no-any-return, no-untyped-call]


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group as a new tensor: in place it would change tensors saved by autograd or recompute."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def gathered(x: Tensor, group: Group, dim: int) -> Tensor:
    """The ranks' slices concatenated along `dim`: a new tensor, since some models write into it."""
    x, size = x.contiguous(), dist.get_world_size(group)
    if math.prod(x.shape[:dim]) == 1:  # the gathered memory is in order already
        full = x.new_empty((*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]))
        if full.numel():  # a vocabulary slice may be empty
            _all_gather(full.view(-1), x.view(-1), group=group)
        return full
    slices = x.new_empty((size, *x.shape))
    if slices.numel():
        _all_gather(slices.view(-1), x.view(-1), group=group)
    return torch.cat(slices.unbind(0), dim)


def begin_gathered(x: Tensor, group: Group) -> PendingCollective:
    """`gathered` along dimension 0."""
    x = x.contiguous()
    full = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    work = _all_gather(full.view(-1), x.view(-1), group=group, async_op=True) if full.numel() else None
    return PendingCollective(full, x, work)


def begin_scattered(x: Tensor, group: Group) -> PendingCollective:
    """`scattered` along dimension 0."""
    x = x.contiguous()
    own = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    work = _reduce_scatter(own.view(-1), x.view(-1), group=group, async_op=True) if own.numel() else None
    return PendingCollective(own, x, work)


def scattered(x: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's slice, along `dim`, of the sum over the group."""
    size = dist.get_world_size(group)
    own = x.new_empty((*x.shape[:dim], x.shape[dim] // size, *x.shape[dim + 1 :]))
    if own.numel():
        slices = x.reshape(*x.shape[:dim], size, *own.shape[dim:]).movedim(dim, 0)
        _reduce_scatter(own.view(-1), slices.reshape(-1), group=group)
    return own


def own_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    size = x.shape[dim] // dist.get_world_size(group)
    return x.narrow(dim, dist.get_rank(group) * size, size)


def contiguous_slice(x: Tensor, group: Group, dim: int) -> Tensor:
    """`own_slice`, contiguous."""
    return own_slice(x, group, dim).contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Moved(torch.autograd.Function):
    """`there` in the forward, `back` in the backward; each takes (tensor, group, dim)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.dim, ctx.back = group, dim, back
        return there(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad, ctx.group, ctx.dim), None, None, None, None
