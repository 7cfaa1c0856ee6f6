"""The gradient norm of the whole model, and clipping, from ownership alone.

norm^2 = sum over groups of parameters with the same sharded axes of: all-reduce over those axes of sum(local grad^2).
A replicated parameter is counted once because no axis sums it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from weft.comm.groups import sum_over
from weft.engine.mesh import Topology
from weft.engine.ownership import local, sharded_axes


@torch.no_grad()
def global_norm(parameters: Sequence[nn.Parameter], topology: Topology, *, device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients, the same on every rank; stays on the device."""
    groups: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[sharded_axes(parameter)].append(local(parameter.grad))
    total = torch.zeros((), device=device)
    # Every rank walks the groups in the same order: the order of a collective is part of its meaning.
    for axis_names in sorted(groups):
        square = torch.nn.utils.get_total_norm(groups[axis_names]).to(device=device, dtype=torch.float32).square()
        for axis in axis_names:
            sum_over(square, topology.group(axis))
        total = total + square
    return total.sqrt()


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient by a 0-dim device tensor, without a host synchronisation."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(
            gradients, factor
        )  # what clip_grads_with_norm_ itself calls; that one refuses DTensors here


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm); exactly 1 below the bound, so unclipped runs are untouched bit by bit."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
