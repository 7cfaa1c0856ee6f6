"""Process groups: one path for one rank or many.

A single process gets a real one-rank group on an in-memory store, so that meshes, sharding and checkpoints need no
second code path. Other code starts and joins ranks. Groups beyond the default one belong to their creator
(`OwnedGroups`): with Gloo each has three threads and a socket to every member, so a process must destroy them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.comm.flight import begin_world


def ensure_group(*, device_type: str, timeout_s: float = 300.0) -> bool:
    """Create the one-rank default group if there is none; returns whether this call created it."""
    if dist.is_initialized():
        return False
    begin_world()
    store = dist.HashStore()  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend_for(device_type), store=store, rank=0, world_size=1, timeout=timeout)
    return True


def backend_for(device_type: str) -> str:
    """Gloo for CPU tensors; NCCL for those on GPUs."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


class OwnedGroups:
    """The process groups of one owner. All ranks create and destroy them in the same order."""

    def __init__(self) -> None:
        self._world = dist.group.WORLD
        self._groups: list[dist.ProcessGroup] = []
        self._is_closed = False

    def new(
        self,
        ranks: list[int] | None = None,
        *,
        title: str,
        backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> dist.ProcessGroup | None:
        """A new group; None on ranks outside of it. Collective. Reports of missing ranks name the group by `title`."""
        group = dist.new_group(ranks, timeout=timeout or world_timeout(), backend=backend, group_desc=title)
        if ranks is not None and dist.get_rank() not in ranks:
            return None
        self._groups.append(group)
        return group  # type: ignore[no-any-return]

    def new_disjoint(self, rank_lists: Iterable[list[int]], *, title: str) -> dist.ProcessGroup | None:
        """Create one group per list of ranks (disjoint); returns this rank's group, None if it is in no list."""
        created = [self.new(ranks, title=title) for ranks in rank_lists]
        return next((group for group in created if group is not None), None)

    def new_partition(self, rank_lists: Iterable[list[int]], *, title: str) -> dist.ProcessGroup:
        """As `new_disjoint`, of lists that contain all ranks."""
        own = self.new_disjoint(rank_lists, title=title)
        if own is None:
            raise RuntimeError(f"rank {dist.get_rank()} is in no {title} group")
        return own

    def adopt(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Own groups that torch created. A mesh may contain the default group, which is never owned here."""
        adopted = [group for group in groups if group is not self._world]
        for group in adopted:
            _limit(group, world_timeout())
        self._groups += adopted

    def close(self) -> None:
        """Destroy the groups. Collective. A no-op the second time, or after their default group was destroyed."""
        groups, self._groups = self._groups, []
        if self._is_closed or dist.group.WORLD is not self._world:
            return
        self._is_closed = True
        if dist.get_world_size() > 1:
            dist.barrier()  # a rank that closes its sockets early would break the last collective of the others
        for group in groups:
            dist.destroy_process_group(group)


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum `values` in place over the group; no collective in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def world_timeout() -> timedelta | None:
    """The timeout of the default group; None if its backend has none to read.

    Torch gives every other group a default of half an hour: a rank that hangs there would be noticed that late.
    """
    world = dist.group.WORLD
    backend = _cpu_backend(world) if world is not None and dist.is_gloo_available() else None
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None


def _limit(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """For groups that torch created: a mesh takes no timeout."""
    if timeout is not None and hasattr(distributed_c10d, "_set_pg_timeout"):
        distributed_c10d._set_pg_timeout(timeout, group)


def _cpu_backend(group: dist.ProcessGroup) -> object:
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:  # the group has no CPU backend
        return None
