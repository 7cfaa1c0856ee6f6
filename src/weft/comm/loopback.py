"""Loopback: the collectives of one rank without peers, as copies on its device.

Purpose: timing one rank of a large world on one GPU. The kernels, buffers, streams and memory traffic of the step are
real, the network takes no time: an upper bound on speed, and the memory of a real rank.

    all-gather      [own | own | ... | own]     the local shard copied into every rank's slot
    reduce-scatter  own slot of the input       as if every other rank had sent zeros to a sum, or the same to a mean
    all-to-all      the input                   as if every rank sent what is sent to it: sizes are those of this rank
    all-reduce      unchanged
    send, receive   what this rank sent last: as if every rank of a ring sent the same

Torch's `fake` process group does not suffice: the values it leaves in the slots are undefined and differ by version
(2.11 leaves reduced gradients uninitialised). Garbage or zeros draw less power than weights and run at higher clocks,
so their times are not those of training.

This is not training. All slots hold the same weights, so a loss only shows that numbers are finite and change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, HashStore  # torch has no public class of a finished collective

BACKEND = "loopback"
_Base: Any = dist.ProcessGroup  # the stubs describe its C++ signatures, which a subclass does not have


@contextmanager
def loopback_world(*, num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Rank `rank` of `num_ranks`, alone in this process."""
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _new_group(options: Any, _backend_options: Any) -> LoopbackGroup:
    return LoopbackGroup(options.group_rank, options.group_size, name=options.group_id)


class LoopbackGroup(_Base):  # type: ignore[misc]
    """A group of which only this rank exists. Copies go to the current stream: a collective is done when it returns."""

    def __init__(self, rank: int, size: int, *, name: str) -> None:
        super().__init__(rank, size)
        self._name = name
        self._sent: list[Tensor] = []

    @property
    def group_name(self) -> str:
        """Kept here: torch keeps it in backends, of which a group written in Python has none."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> FakeWork:
        flat = own.view(-1)
        # slot by slot: contiguous copies, which one copy with an expanded source is not
        for slot in output.view(self.size(), -1):
            if slot.data_ptr() != flat.data_ptr():
                slot.copy_(flat)
        return FakeWork()

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> FakeWork:
        output.view(-1).copy_(given.view(self.size(), -1)[self.rank()])
        return FakeWork()

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> FakeWork:
        if output_sizes != sizes:
            raise ValueError(f"a loopback returns what is sent: {sizes} rows, not {output_sizes}")
        output.copy_(given)
        return FakeWork()

    def allgather(self, outputs: list[list[Tensor]], own: list[Tensor], opts: Any = None) -> FakeWork:
        for slots, tensor in zip(outputs, own, strict=True):
            for slot in slots:
                slot.copy_(tensor)
        return FakeWork()

    def allreduce(self, _tensors: list[Tensor], opts: Any = None) -> FakeWork:
        return FakeWork()

    broadcast = allreduce

    def send(self, tensors: list[Tensor], _to: int, _tag: int) -> FakeWork:
        self._sent += tensors
        return FakeWork()

    def recv(self, tensors: list[Tensor], _from: int, _tag: int) -> FakeWork:
        for tensor in tensors:
            if not self._sent:
                raise ValueError("a loopback receives what was sent before: nothing was")
            tensor.copy_(self._sent.pop(0))
        return FakeWork()

    def barrier(self, opts: Any = None) -> FakeWork:
        return FakeWork()

    # the names of torch 2.11
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
