"""Batch norms with statistics over all data-parallel ranks.

    count, sum -> mean -> sum of squared distances -> variance      each sum over the rows of all ranks

With statistics of its rows alone every rank would differ, and the curve from that of one process. Here a micro-batch
of all ranks is normalised as one process normalises the same rows; running statistics have the same bits on every rank.
Gradients follow from the sums: the gradient of a sum over ranks is the sum over ranks of gradients. It works with any
backend and device; torch's SyncBatchNorm works on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base class of torch's batch norms; no public name

from weft.comm.observer import buffer_collectives
from weft.engine.wrap_forward import wrap_forward


def find_batch_norms(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]


def span_ranks(model: nn.Module, names: Sequence[str], group: dist.ProcessGroup) -> None:
    """Take statistics over the ranks of `group`, which nothing else may use: it sends in the order of forwards."""
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, _BatchNorm):
            wrap_forward(module, SpanningBatchNorm(module, group))


class SpanningBatchNorm:
    """Replaces a batch norm's own forward whenever that takes statistics of its input."""

    def __init__(self, module: _BatchNorm, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group

    # collectives in the middle of the formula: a compiled block breaks its graph here
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, forward: Callable[..., Any], input: Tensor) -> Tensor:
        module = self.module
        if not module.training and module.running_mean is not None and module.running_var is not None:
            return forward(input)  # type: ignore[no-any-return]
        module._check_input_dim(input)  # type: ignore[no-untyped-call]
        return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        module = self.module
        values = input.float() if input.dtype.itemsize < 4 else input
        others = [dim for dim in range(values.ndim) if dim != 1]
        count = values.new_full((1,), values.numel() / values.shape[1])
        total = self._summed(torch.cat([values.sum(others), count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = values - _along(mean, values)
        variance = self._summed(centred.square().sum(others)) / count
        if module.training and module.running_mean is not None:
            self._update_running(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        normal = centred * _along(torch.rsqrt(variance + module.eps), values)
        if module.weight is not None:
            normal = normal * _along(module.weight.to(values.dtype), values)
        if module.bias is not None:
            normal = normal + _along(module.bias.to(values.dtype), values)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        module = self.module
        share: float | Tensor = module.momentum if module.momentum is not None else 0.0
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:  # the mean of all batches so far
                share = 1.0 / module.num_batches_tracked.to(mean.dtype)
        for running, found in ((module.running_mean, mean), (module.running_var, variance)):
            if running is not None:
                running.copy_(running * (1.0 - share) + found.to(running.dtype) * share)

    def _summed(self, own: Tensor) -> Tensor:
        return _SumOverRanks.apply(own, self.group)  # type: ignore[no-any-return,no-untyped-call]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return _sum(own, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], context.group), None


def _sum(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = own.detach().clone(memory_format=torch.contiguous_format)
    with buffer_collectives():
        dist.all_reduce(total, group=group)
    return total


def _along(channels: Tensor, values: Tensor) -> Tensor:
    """One value per channel, shaped to broadcast over the other dimensions."""
    return channels.view(1, -1, *[1] * (values.ndim - 2))
