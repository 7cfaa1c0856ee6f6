"""Process groups: one path for one rank or many.

A single process gets a real one-rank group on an in-memory store, so that meshes, sharding and checkpoints need no
second code path. Who starts and joins ranks is decided elsewhere.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def ensure_group(*, device_type: str, timeout_s: float = 300.0) -> bool:
    """Make the one-rank default group where there is none; True when it was made here."""
    if dist.is_initialized():
        return False
    store = dist.HashStore()  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend_for(device_type), store=store, rank=0, world_size=1, timeout=timeout)
    return True


def backend_for(device_type: str) -> str:
    """Gloo carries CPU tensors always; on GPUs NCCL carries the device's."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`values` summed in place over the group; nothing travels in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values
