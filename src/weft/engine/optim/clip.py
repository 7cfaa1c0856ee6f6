"""The gradient norm of the full model, and clipping, from ownership alone.

norm^2 = sum over groups of chunks with the same sharded axes of: all-reduce over these of sum(local grad^2) / copies.
A replicated parameter counts once because no axis sums it; a chunk held by several ranks of an axis is divided by them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

import torch
from torch import nn

from weft.comm.groups import sum_over
from weft.core.shards import LocalShard
from weft.engine.mesh import Topology
from weft.engine.ownership import LocalShards, chunks_of, local, sharded_axes

PIECE_ELEMENTS = 2**20  # torch casts a tensor to float64 before it adds: no copy of a whole gradient
Owned = tuple[tuple[str, ...], int]  # axes that shard a chunk, and their ranks that hold it


@torch.no_grad()
def global_norm(
    parameters: Mapping[str, nn.Parameter],
    topology: Topology,
    *,
    shards: LocalShards,
    not_counted: Container[str] = (),
    partitioning: Sequence[str] = (),
    device: torch.device,
) -> torch.Tensor:
    """The 2-norm of all gradients, the same on every rank; stays on the device.

    `not_counted`: parameters that another pipeline stage also holds and counts. `partitioning`: axes whose ranks hold
    different parameters; without them the norm is that of this rank's stages.
    """
    parameters = {name: parameter for name, parameter in parameters.items() if name not in not_counted}
    groups: dict[Owned, list[torch.Tensor]] = defaultdict(list)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            for owned, gradient in _owned(parameter.grad, sharded_axes(parameter), shards.get(name)):
                groups[owned].append(gradient)
    # a rank may hold no rows of a group that other ranks hold rows of; all must join its collective
    for name, parameter in parameters.items():
        shard = shards.get(name)
        if shard is not None and shard.is_sharded and parameter.grad is not None:
            for chunk in shard.chunks:
                groups[(*sharded_axes(parameter), *shard.axis_names), chunk.copies] += []
    total = torch.zeros((), device=device)
    # Every rank sums the groups in the same order: else collectives would mismatch.
    for axis_names, copies in sorted(groups):
        gradients = groups[axis_names, copies]
        square = _total_norm(gradients).to(device=device, dtype=torch.float32).square() / copies
        for axis in axis_names:
            sum_over(square, topology.group(axis))
        total = total + square
    topology.sum_over(total, partitioning)
    return total.sqrt()


def _total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32 at least: torch returns the norm of a bfloat16 tensor in bfloat16, with three digits.

    On a CPU in float64: its float32 kernel adds one square after another, and loses 0.3% of 20 million elements.
    """
    if any(gradient.device.type == "cpu" for gradient in gradients):
        pieces = [piece for gradient in gradients for piece in torch.split(gradient.flatten(), PIECE_ELEMENTS)]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    elif any(gradient.dtype == torch.bfloat16 for gradient in gradients):
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    else:
        return torch.nn.utils.get_total_norm(gradients)
    return torch.stack(norms).square().sum().sqrt()


def _owned(
    gradient: torch.Tensor, sharded: tuple[str, ...], shard: LocalShard | None
) -> list[tuple[Owned, torch.Tensor]]:
    """A gradient by ownership: in one, or per chunk if several ranks of the shard's axes hold some."""
    own = local(gradient)
    if shard is None or not shard.is_sharded:
        return [((sharded, 1), own)]
    copies = {chunk.copies for chunk in shard.chunks}
    if len(copies) == 1:
        return [(((*sharded, *shard.axis_names), copies.pop()), own)]
    return [
        (((*sharded, *shard.axis_names), chunk.copies), own[chunk.local_index]) for chunk in chunks_of(gradient, shard)
    ]


@torch.no_grad()
def scale_gradients(parameters: Sequence[nn.Parameter], factor: torch.Tensor) -> None:
    """Multiply every gradient by a 0-dim device tensor, without a host synchronisation."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)  # as clip_grads_with_norm_ does, which refuses DTensors here


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / norm); exactly 1 below the bound, so unclipped runs keep their bits."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
