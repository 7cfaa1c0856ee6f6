"""Copies gradients into the buffer of a reduce-scatter, at memory bandwidth.

`fully_shard` lays the gradients of a unit out by rank, cast to the dtype of communication. Torch's kernel for it moves
1.9 TB/s on an H200, a plain copy 4.1: 26 ms of the 1.5 s of a step of an 8B model. This one makes one copy per
parameter if rows divide evenly; else torch's own kernel runs.

Nowhere else the engine sees which gradients a buffer has: those of one backward, in a pipeline perhaps a part of the
unit's. Their sizes stay with the buffer, for codes (`coded.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

# No public way to replace the copy: tests/gpu/test_fast_path_gpu.py fails when it moves.
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

from weft.engine.kernels.triton_here import has_triton

_torch_copy_in: Any = collectives.foreach_reduce_scatter_copy_in


def patch_reduce_scatter_copy(kind: Literal["own", "torch"]) -> None:
    """Affects every sharded model of this process; the numbers are the same."""
    collectives.foreach_reduce_scatter_copy_in = copy_in if kind == "own" else torch_copy_in  # type: ignore[assignment]


def sizes_in(buffer: torch.Tensor) -> tuple[int, ...]:
    """Elements of a rank's share of each gradient in the buffer of a reduce-scatter."""
    sizes: tuple[int, ...] = buffer.share_sizes  # type: ignore[attr-defined]
    return sizes


def _note(gradients: list[torch.Tensor], buffer: torch.Tensor, world_size: int) -> None:
    rows = [-(-len(gradient) // world_size) for gradient in gradients]
    sizes = tuple(own * gradient[:1].numel() for own, gradient in zip(rows, gradients, strict=True))
    buffer.share_sizes = sizes  # type: ignore[attr-defined]


def torch_copy_in(gradients: list[torch.Tensor], buffer: torch.Tensor, world_size: int) -> None:
    _note(gradients, buffer, world_size)
    _torch_copy_in(gradients, buffer, world_size)


def copy_in(gradients: list[torch.Tensor], buffer: torch.Tensor, world_size: int) -> None:
    """Fill `buffer`, flat [ranks, ...]: per rank its rows of every gradient in turn."""
    _note(gradients, buffer, world_size)
    if not (buffer.is_cuda and has_triton()) or not all(_divides(gradient, world_size) for gradient in gradients):
        _torch_copy_in(gradients, buffer, world_size)
        return
    from weft.engine.dp.reduce_scatter_copy_triton import copy_rows

    rows, begin = buffer.view(world_size, -1), 0
    for gradient in gradients:
        share = gradient.numel() // world_size
        copy_rows(gradient, rows, begin, share)
        begin += share


def _divides(gradient: torch.Tensor, world_size: int) -> bool:
    return gradient.is_contiguous() and gradient.shape[0] % world_size == 0
