"""Host copies of tensors that a background thread writes while training continues. No communication, no disk.

    stage() returns  =>  the live tensors may change; the save uses the copies

The save plan (which rank writes which slice) is built here too, from the live tensors, so that the background thread
holds no reference to them, which would keep GPU memory alive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from weft.checkpoint.parts import ShardTensor, chunk_at


class StagedPlanner(DefaultSavePlanner):
    """DCP's planner with a prebuilt local plan and the data of staged shards."""

    def __init__(self, state: dict[str, Tensor], shards: dict[str, Tensor]) -> None:
        super().__init__()
        self._shards = shards
        # chunks without the live memory behind them
        parts = {key: tensor for key, tensor in state.items() if isinstance(tensor, ShardTensor)}
        self._boxes = {key: tensor.chunks for key, tensor in parts.items()}
        self._releases = {key: tensor.release for key, tensor in parts.items() if tensor.release is not None}
        self._read = ""  # the key that was read last
        self.set_up_planner(state)
        self._local_plan = super().create_local_plan()
        self.state_dict = {}

    def create_local_plan(self) -> SavePlan:
        return self._local_plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self._read in self._releases and self._read != index.fqn:
            self._releases[self._read]()
        self._read = index.fqn
        shard = self._shards[index.fqn]
        if index.fqn in self._boxes:
            return chunk_at(shard, self._boxes[index.fqn], index)
        return shard


class StagingBuffers:
    """Host memory for one save, reused by the next: pinned memory is slow to allocate and fast to copy to."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        """Host copies that no longer depend on the given tensors."""
        self._buffers = {key: self._buffer(key, shard) for key, shard in shards.items()}
        for key, shard in shards.items():
            self._buffers[key].copy_(shard, non_blocking=True)
        if any(shard.is_cuda for shard in shards.values()):
            # Otherwise the save would read buffers before the device has filled them.
            torch.cuda.current_stream().synchronize()
        return dict(self._buffers)

    def _buffer(self, key: str, shard: Tensor) -> Tensor:
        old = self._buffers.get(key)
        if old is not None and old.shape == shard.shape and old.dtype == shard.dtype:
            return old
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)


def local_shards(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The local shard of every tensor: of a DTensor its shard, of a plain tensor all."""
    return {key: _local(key, tensor) for key, tensor in state.items()}


def _local(key: str, tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardTensor):
        return tensor.local
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise TypeError(f"{key} is a partial sum; reduce it before saving")
        return _local(key, tensor.to_local())
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        # A subclass would be saved as a pickle of its class, which weights-only loading refuses.
        raise TypeError(f"{key} is a {type(tensor).__name__}; only plain tensors and DTensors of them can be saved")
    return tensor.detach()
