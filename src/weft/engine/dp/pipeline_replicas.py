"""Replicas in a pipeline: gradients are summed when the last backward is done.

DDP's reducer counts on one backward for each forward, in turn; a pipeline has several forwards under way, and may
compute weights' gradients after all else. So sums are taken here, in buckets of DDP's own size, once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from weft.engine.dp.strategy import Strategy

BUCKET_BYTES = 25 * 2**20


class Summed(Strategy):
    """The model as it is; its gradients become those of all replicas."""

    def __init__(self, model: nn.Module, *, group: dist.ProcessGroup) -> None:
        super().__init__(model)
        self._group = group

    def after_backwards(self) -> None:
        self.reduce([parameter for parameter in self.module.parameters() if parameter.requires_grad])

    @torch.no_grad()
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # every rank must bring the same
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            sum_bucket(bucket, self._group)


@torch.no_grad()
def sum_bucket(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Gradients that every replica has, of one dtype, summed in place: one all-reduce."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if flat.numel() == 0:  # a rank beyond the last row of a sharded tensor; so is its place in every replica
        return
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [one.numel() for one in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In the order in which they come in a backward; a large one alone."""
    bucket: list[torch.Tensor] = []
    for gradient in reversed(gradients):
        nbytes = sum(map(_nbytes, bucket))
        if bucket and (
            bucket[0].dtype != gradient.dtype or nbytes + gradient.numel() * gradient.element_size() > BUCKET_BYTES
        ):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
