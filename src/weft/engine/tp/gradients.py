"""Sums gradients that ranks of the tp axis hold as partial sums: once per step, after the backward, before the norm.

Small gradients are flattened into one all-reduce per group of ranks; large ones are reduced in place, one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from weft.engine.ownership import LocalShards, chunks_of, local
from weft.engine.precision import zero_gradient
from weft.engine.tp.grid import Grid

ALONE_ELEMENTS = 2**22  # a copy of more than this costs more memory than a collective costs time


@torch.no_grad()
def sum_partial_gradients(parameters: Mapping[str, nn.Parameter], shards: LocalShards, grid: Grid) -> None:
    """In place. Ranks loop over the same parameters in the same order, so that collectives match.

    With sequence parallel a rank may use parameters that another does not (replicated experts, by their tokens): a rank
    without a gradient adds zeros, and the sum of marks shows whether another rank had one.
    """
    together: dict[str, list[torch.Tensor]] = defaultdict(list)
    marks: dict[str, list[torch.Tensor]] = defaultdict(list)
    absent: list[tuple[nn.Parameter, torch.Tensor, str, int]] = []
    for name, parameter in parameters.items():
        groups = sorted({chunk.summed_over for chunk in shards[name].chunks if chunk.summed_over is not None})
        if not groups:
            continue
        gradient = zero_gradient(parameter) if parameter.grad is None else parameter.grad
        if parameter.grad is None:
            absent.append((parameter, gradient, groups[0], len(marks[groups[0]])))
        own = local(gradient)
        marks[groups[0]].append(own.new_full((1,), float(parameter.grad is not None)))
        for chunk in chunks_of(gradient, shards[name]):
            if chunk.summed_over is not None and chunk.num_elements:
                view = own[chunk.local_index]
                if view.numel() > ALONE_ELEMENTS and view.is_contiguous():
                    dist.all_reduce(view, group=grid.group(chunk.summed_over))
                else:
                    together[chunk.summed_over].append(view)
    used = {name: _sum_together(together[name], marks[name], grid.group(name)) for name in sorted({*together, *marks})}
    for parameter, gradient, name, index in absent:  # rare, and the only wait for the device here
        if used[name][index].item() > 0:
            parameter.grad = gradient


def _sum_together(gradients: list[torch.Tensor], marks: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Sums gradients in place; returns the summed marks."""
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), *marks])
    dist.all_reduce(flat, group=group)
    *totals, found = torch.split(flat, [*(gradient.numel() for gradient in gradients), len(marks)])
    for gradient, total in zip(gradients, totals, strict=True):
        gradient.copy_(total.view_as(gradient))
    return found
