"""Process groups: one path for one rank or many.

A single process gets a real one-rank group on an in-memory store, so that meshes, sharding and checkpoints need no
second code path. Who starts and joins ranks is decided elsewhere. Groups beyond the default one belong to whoever made
them (`OwnedGroups`): with Gloo each has three threads and a socket to every member, so a process must give them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


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


class OwnedGroups:
    """The process groups of one owner. All ranks make them, and give them back, in the same order."""

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
        """A new group; None on ranks that are not in it. Collective. `title` names it where a rank does not arrive."""
        group = dist.new_group(ranks, timeout=timeout or world_timeout(), backend=backend, group_desc=title)
        if ranks is not None and dist.get_rank() not in ranks:
            return None
        self._groups.append(group)
        return group  # type: ignore[no-any-return]

    def of_lines(self, lines: Iterable[list[int]], *, title: str) -> dist.ProcessGroup | None:
        """A group for each of these disjoint lines of ranks, and of them this rank's; None where it has none."""
        made = [self.new(line, title=title) for line in lines]
        return next((group for group in made if group is not None), None)

    def adopt(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Groups that torch made for this owner; a mesh may give the default group, which nobody here owns."""
        adopted = [group for group in groups if group is not self._world]
        for group in adopted:
            _limit(group, world_timeout())
        self._groups += adopted

    def close(self) -> None:
        """Destroy them. Collective. A second time, or after their world has ended, there is nothing to do."""
        groups, self._groups = self._groups, []
        if self._is_closed or dist.group.WORLD is not self._world:
            return
        self._is_closed = True
        if dist.get_world_size() > 1:
            dist.barrier()  # a rank that closes its sockets early would break the last collective of the others
        for group in groups:
            dist.destroy_process_group(group)


def sum_over(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`values` summed in place over the group; nothing travels in a group of one."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return values


def world_timeout() -> timedelta | None:
    """How long the default group waits for a silent rank; None where its backend does not say.

    Torch gives every other group its own default, half an hour: a rank that hangs there would be noticed that late.
    """
    world = dist.group.WORLD
    backend = _cpu_backend(world) if world is not None and dist.is_gloo_available() else None
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None


def _limit(group: dist.ProcessGroup, timeout: timedelta | None) -> None:
    """For groups that torch made: a mesh takes no timeout."""
    if timeout is not None and hasattr(distributed_c10d, "_set_pg_timeout"):
        distributed_c10d._set_pg_timeout(timeout, group)


def _cpu_backend(group: dist.ProcessGroup) -> object:
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group of another device alone
        return None
