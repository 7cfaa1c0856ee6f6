"""Loopback: the sharded collectives of one rank whose peers are not there, as copies on its own device.

What it is for: one rank of a large world timed on one GPU. The kernels, buffers, streams and memory traffic of
`fully_shard` are real, the network takes no time: an upper bound on speed, and the memory of a real rank.

    all-gather      [own | own | ... | own]     the own shard copied into every other rank's slot
    reduce-scatter  own slot of the input       as if every other rank had sent zeros to a sum, or the same to a mean

Torch's `fake` process group alone will not do: what it puts into the slots is its own affair and differs by version
(2.11 leaves reduced gradients as the allocator found them), and garbage, or zeros, which draw less power than weights
do and so run at higher clocks, times something else.

What it is not: training. All slots have the same weights, so a loss says only that numbers are finite and that they
moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# the abstract bases that the public `set_custom_all_gather` and `set_custom_reduce_scatter` ask for
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


@contextmanager
def loopback_world(*, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Rank `rank` of `num_ranks`, alone in this process: torch's `fake` group, which sends and waits for nothing.

    Its all-reduce leaves values as they are. Modules sharded inside need `install_loopback` before they are used.
    """
    # the one form torch has of a world that is not there; the import registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def install_loopback(model: nn.Module) -> int:
    """Replace the collectives of every unit that `fully_shard` made of `model`; the number of units.

    Zero units is an error: nothing was sharded yet, and the caller would time something else.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError("the model has no unit of fully_shard: install the loopback after sharding")
    all_gather, reduce_scatter = LoopbackAllGather(), LoopbackReduceScatter()
    for unit in units:
        unit.set_custom_all_gather(all_gather)
        unit.set_custom_reduce_scatter(reduce_scatter)
    return len(units)


class _Allocates:
    """Buffers from the ordinary allocator, as the collectives that are replaced take them."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LoopbackAllGather(_Allocates, AllGather):
    """The own shard in every slot. `fully_shard` has put it into its own already: input is a view of output."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        own = input_tensor.view(-1)
        # slot by slot: a copy between whole runs of memory, which one copy with a repeated source is not
        for slot in output_tensor.view(group.size(), -1):
            if slot.data_ptr() != own.data_ptr():
                slot.copy_(own)


class LoopbackReduceScatter(_Allocates, ReduceScatter):
    """The own slot of the input, whatever `op` would do with those of the others."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        output_tensor.view(-1).copy_(input_tensor.view(group.size(), -1)[group.rank()])
