"""Replicas in a pipeline: gradients are summed when the last backward is done.

DDP's reducer requires one backward after each forward; a pipeline has several forwards in flight, and may compute
weight gradients last. So gradients are summed here, in buckets of DDP's size, once per step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from weft.comm.sums import GroupSum
from weft.engine.dp.coded import errors_of_buckets
from weft.engine.dp.strategy import Strategy
from weft.engine.precision import gradient_dtype, zero_gradient


class Summed(Strategy):
    """The unwrapped model; its gradients are summed over all replicas."""

    def __init__(self, model: nn.Module, *, sums: GroupSum, bucket_bytes: int, feeds_back: bool = False) -> None:
        super().__init__(model)
        self._sums, self._bucket_bytes = sums, bucket_bytes
        if feeds_back:
            parameters = self._trained()
            gradients = [torch.empty(one.shape, dtype=gradient_dtype(one), device="meta") for one in parameters]
            counts = [sum(map(torch.numel, bucket)) for bucket in _buckets(gradients, bucket_bytes)]
            self.errors = errors_of_buckets(sums, counts, device=parameters[0].device)

    def after_backwards(self) -> None:
        self.reduce(self._trained())

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # every rank must reduce the same tensors
                parameter.grad = zero_gradient(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for place, bucket in enumerate(_buckets(gradients, self._bucket_bytes)):
            sum_bucket(bucket, self._sums, place=place)


@torch.no_grad()
def sum_bucket(gradients: list[torch.Tensor], sums: GroupSum, *, place: int = 0) -> None:
    """Sum gradients of one dtype in place over the replicas: one all-reduce, that of this place in a step."""
    flat, sizes = torch.cat([gradient.reshape(-1) for gradient in gradients]), [one.numel() for one in gradients]
    if flat.numel() == 0:  # a rank beyond the last row of a sharded tensor, in every replica alike
        return
    sums.sum(flat, place=place, sizes=tuple(sizes))
    for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
        gradient.copy_(total.view_as(gradient))


def _buckets(gradients: list[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """In the order of a backward; a large gradient alone."""
    bucket: list[torch.Tensor] = []
    for gradient in reversed(gradients):
        nbytes = sum(one.nbytes for one in (*bucket, gradient))
        if bucket and (bucket[0].dtype != gradient.dtype or nbytes > bucket_bytes):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
