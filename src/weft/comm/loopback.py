"""Loopback: the sharded collectives of one rank without peers, as copies on its device.

Purpose: timing one rank of a large world on one GPU. The kernels, buffers, streams and memory traffic of `fully_shard`
are real, the network takes no time: an upper bound on speed, and the memory of a real rank.

    all-gather      [own | own | ... | own]     the local shard copied into every other rank's slot
    reduce-scatter  own slot of the input       as if every other rank had sent zeros to a sum, or the same to a mean

Torch's `fake` process group alone does not suffice: the values it leaves in the slots are undefined and differ by
version (2.11 leaves reduced gradients uninitialised). Garbage or zeros draw less power than weights and run at higher
clocks, so their times are not those of training.

This is not training. All slots hold the same weights, so a loss only shows that numbers are finite and change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# the abstract bases that the public `set_custom_all_gather` and `set_custom_reduce_scatter` require
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


@contextmanager
def loopback_world(*, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Rank `rank` of `num_ranks`, alone in this process: torch's `fake` group, which sends and waits for nothing.

    Its all-reduce leaves values unchanged. Modules sharded inside need `install_loopback` before they are used.
    """
    # torch has no public form of a world without peers; the import registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def install_loopback(model: nn.Module) -> int:
    """Replace the collectives of every `fully_shard` unit of `model`; returns the number of units.

    Zero units is an error: the model is not sharded, so the caller would time an unsharded step.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError("the model has no fully_shard unit: install the loopback after sharding")
    all_gather, reduce_scatter = LoopbackAllGather(), LoopbackReduceScatter()
    for unit in units:
        unit.set_custom_all_gather(all_gather)
        unit.set_custom_reduce_scatter(reduce_scatter)
    return len(units)


class _DefaultAllocation:
    """Allocates buffers with the default allocator, as the replaced collectives do."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LoopbackAllGather(_DefaultAllocation, AllGather):
    """Copies the local shard into every slot. Its own slot is filled already: input is a view of output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        own = input_tensor.view(-1)
        # slot by slot: contiguous copies, which one copy with an expanded source is not
        for slot in output_tensor.view(group.size(), -1):
            if slot.data_ptr() != own.data_ptr():
                slot.copy_(own)


class LoopbackReduceScatter(_DefaultAllocation, ReduceScatter):
    """Copies this rank's slot of the input, for every `op`."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        output_tensor.view(-1).copy_(input_tensor.view(group.size(), -1)[group.rank()])
