"""DistributedDataParallel without its C++ reducer: the same memory and the same all-reduces, on fake tensors.

Buckets are allocated at the start and hold every gradient from the first all-reduce on (`gradient_as_bucket_view`);
each bucket is all-reduced once per step, when the last micro-batch has filled it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from weft.comm.sums import GroupSum
from weft.engine.dp.coded import errors_of_buckets
from weft.engine.dp.ddp import FIRST_BUCKET_BYTES
from weft.engine.dp.strategy import Strategy
from weft.engine.precision import gradient_dtype


class FakeReplicated(Strategy):
    """The dry run's replacement of `engine.dp.ddp.Replicated`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        sums: GroupSum,
        find_unused_parameters: bool,
        bucket_bytes: int,
        feeds_back: bool = False,
    ) -> None:
        super().__init__(model)
        self._sums = sums
        self._is_last = True
        self._may_be_unused = find_unused_parameters
        self._filled: list[int] = []
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._buckets = _buckets(list(reversed(trainable)), bucket_bytes)
        if feeds_back:
            sizes = [bucket.numel() for bucket, _ in self._buckets]
            self.errors = errors_of_buckets(sums, sizes, device=next(model.parameters()).device)
        for parameter in trainable:
            parameter.register_post_accumulate_grad_hook(self._into_bucket)  # type: ignore[no-untyped-call]

    @contextmanager
    def microbatch(self, *, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        self._filled = [0] * len(self._buckets)
        yield

    def clear_gradients(self, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=self._may_be_unused)

    def gradient_buckets(self) -> list[torch.Tensor]:
        return [bucket for bucket, _ in self._buckets]

    def _into_bucket(self, parameter: torch.Tensor) -> None:
        """Make the gradient a view of its bucket, as DDP does when it reduces; all-reduce a bucket that is full."""
        if not self._is_last:
            return
        for index, (bucket, places) in enumerate(self._buckets):
            place = places.get(id(parameter))
            if place is None:
                continue
            parameter.grad = bucket[place : place + parameter.numel()].view_as(parameter)
            self._filled[index] += 1
            if self._filled[index] == len(places):
                wide = bucket.float()
                offsets = [*places.values(), wide.numel()]
                sizes = tuple(end - begin for begin, end in pairwise(offsets))
                self._sums.sum(wide, place=index, sizes=sizes)
                if wide is not bucket:
                    bucket.copy_(wide)


def _buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[tuple[torch.Tensor, dict[int, int]]]:
    """(flat tensor, offset of each parameter in it), in the order in which gradients are computed."""
    found: list[tuple[torch.Tensor, dict[int, int]]] = []
    places: dict[int, int] = {}
    size, limit = 0, min(FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in parameters:
        places[id(parameter)] = size
        size += parameter.numel()
        if size * gradient_dtype(parameter).itemsize >= limit:
            found.append((_bucket(size, parameter), places))
            places, size, limit = {}, 0, bucket_bytes
    if places:
        found.append((_bucket(size, parameters[-1]), places))
    return found


def _bucket(size: int, parameter: nn.Parameter) -> torch.Tensor:
    return torch.empty(size, dtype=gradient_dtype(parameter), device=parameter.device)
