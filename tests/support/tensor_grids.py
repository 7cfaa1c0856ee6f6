"""A grid over all ranks of a test, chunks of whole tensors, and the bytes that cross the wire by group and phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from weft.comm.ledger import TrafficLedger
from weft.comm.watch import OperatorWatch
from weft.engine.tp.grid import Grid, build_grid


def whole_grid(mode: str, degree: int | None = None) -> Grid:
    """All ranks of the job as grids of `degree` side by side; one grid of all of them where none is given."""
    world, degree = dist.get_world_size(), degree or dist.get_world_size()
    lines = [list(range(at, at + degree)) for at in range(0, world, degree)]
    groups = [dist.new_group(line) for line in lines]
    return build_grid(mode, groups[dist.get_rank() // degree], axis_ranks=lines)


def chunk(x: Tensor, dim: int, parts: int, place: int) -> Tensor:
    return x.detach().chunk(parts, dim)[place].clone()


def own(x: Tensor) -> Tensor:
    """A leaf of this rank with a gradient."""
    return x.detach().clone().requires_grad_()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LinearReference:
    """A linear layer in one process: x, its stored weight and its bias with gradients, its output and that gradient."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    output: Tensor
    output_gradient: Tensor


def linear_reference(shape: tuple[int, int, int], outputs: int, *, is_transposed: bool) -> LinearReference:
    """The layer on inputs of `shape`, after its backward; `is_transposed`: the weight is [inputs, outputs]."""
    x, bias = own(numbers(*shape, seed=1)), own(numbers(outputs, seed=2))
    gradient, stored = numbers(*shape[:2], outputs, seed=3), numbers(outputs, shape[2], seed=4)
    weight = own(stored.T.contiguous() if is_transposed else stored)
    output = F.linear(x, weight.T if is_transposed else weight, bias)
    (output * gradient).sum().backward()
    return LinearReference(x=x, weight=weight, bias=bias, output=output, output_gradient=gradient)


def summed(x: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """What is done after the backward with gradients that are partial."""
    assert x is not None
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def bytes_on_the_wire(grid: Grid, forward: Callable[[], Tensor]) -> dict[tuple[str, str, str], int]:
    """By (group, collective, phase), of a forward and of its backward."""
    phase = ["forward"]
    axes = {group.group_name: name for name, group in grid.groups.items() if name != "tp"}
    ledger = TrafficLedger(axes=axes, phase=lambda: phase[0])
    with OperatorWatch(ledger):
        out = forward()
        phase[0] = "backward"
        out.sum().backward()
    return {(str(row["axis"]), str(row["collective"]), str(row["phase"])): int(row["bytes"]) for row in ledger.rows()}
