"""The ranks of a plan as a device mesh with named axes, and the groups that data and losses are reduced over.

Ranks that share rows of data are neighbours (tp is innermost); `dp_group` has the ranks of equal tp rank.

Topology is passed as this value; nothing in the engine reads ranks from a module global or the environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# "For debugging", and no public form: see `Topology.close`. tests/multiproc/engine/test_close.py fails when it moves.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from weft.comm.groups import OwnedGroups
from weft.core import axes
from weft.core.errors import MeshError
from weft.core.plan import Plan

_SAVE_TIMEOUT = timedelta(minutes=30)  # a slow disk is not a hang: ranks wait here while others write


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in the mesh. `dp_group`: the ranks with different rows of the same global batch."""

    mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_degree: int
    tp_degree: int = 1
    pp_degree: int = 1
    pp_rank: int = 0
    stage_group: dist.ProcessGroup | None = None  # ranks that share this rank's stages; None: all ranks do
    groups: OwnedGroups = field(default_factory=OwnedGroups)  # all groups created for this topology

    @property
    def stage_size(self) -> int:
        """Ranks that share a pipeline rank's stages."""
        return dist.get_world_size() // self.pp_degree

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """The global ranks of this rank's pipeline, first place first."""
        return tuple(range(dist.get_rank() % self.stage_size, dist.get_world_size(), self.stage_size))

    @property
    def dp_mesh(self) -> DeviceMesh:
        """The mesh of `fully_shard`: in a pipeline without the axis of replicas (see `dp/sharded.py`)."""
        known = axes.DATA_AXES if self.pp_degree == 1 else (axes.DP_SHARD,)
        names = tuple(name for name in self.axis_names if name in known)
        return self.mesh if names == self.axis_names else self.mesh[names]

    @property
    def replicas_beside_shards(self) -> dist.ProcessGroup | None:
        """The replicas of this rank's shards that are not in `dp_mesh`; None if there are none."""
        is_left_out = self.pp_degree > 1 and axes.DP_REPLICATE in self.axis_names
        return self.group(axes.DP_REPLICATE) if is_left_out else None

    @property
    def tp_rank_lists(self) -> list[list[int]]:
        """The global ranks of every tp group, in order."""
        return _consecutive_ranks(self.tp_degree)

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names or ())

    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """A separate Gloo group for saves in the background: sharing one with training deadlocks. Collective."""
        if dist.get_world_size() == 1:
            return None
        return self.groups.new(title="checkpoint", backend="gloo", timeout=_SAVE_TIMEOUT)

    def new_data_group(self) -> dist.ProcessGroup:
        """A second group of the ranks of `dp_group`, with a queue separate from that of gradients. Collective."""
        return _new_data_group(self.groups, self.tp_degree, self.stage_size, title="buffers")

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)

    def sum_over(self, value: torch.Tensor, axis_names: Sequence[str]) -> None:
        """Sum `value` in place over the ranks of some axes. Collective."""
        for axis in axis_names:
            dist.all_reduce(value, group=self.group(axis))

    def close(self) -> None:
        """Destroy the groups. Collective."""
        self.groups.close()
        # DTensor caches results with their mesh, and treats equal meshes as one: the next topology would get the
        # destroyed groups, and the cache would keep their threads alive.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def build_topology(plan: Plan, *, device_type: str) -> Topology:
    """The mesh of `plan` over the running ranks."""
    world_size = dist.get_world_size()
    if plan.num_ranks != world_size:
        raise MeshError(
            f"the plan's mesh has {plan.num_ranks} ranks ({describe_mesh(plan)}) but {world_size} are running",
            hint=f"start {plan.num_ranks} ranks (--nproc {plan.num_ranks}) or give [mesh] a product of {world_size}",
        )
    sizes = {axis: size for axis, size in plan.mesh.sizes().items() if size > 1}
    if plan.data_parallel.zero > 0:
        sizes.setdefault(axes.DP_SHARD, 1)  # fully_shard needs its axis even on one rank
    elif plan.mesh.dp_degree == 1 and plan.mesh.tp * plan.mesh.pp > 1:
        sizes.setdefault(axes.DP_REPLICATE, 1)  # every mesh has a data axis
    ordered = {axis: sizes[axis] for axis in axes.MESH_ORDER if axis in sizes} or {axes.DP_REPLICATE: 1}
    mesh = init_device_mesh(device_type, tuple(ordered.values()), mesh_dim_names=tuple(ordered))
    groups = OwnedGroups()
    groups.adopt(mesh.get_all_groups())
    tp, pp = plan.mesh.tp, plan.mesh.pp
    stage_size = world_size // pp
    return Topology(
        mesh=mesh,
        dp_group=_data_group(groups, tp, stage_size),
        dp_rank=dist.get_rank() % stage_size // tp,
        dp_degree=plan.mesh.dp_degree,
        tp_degree=tp,
        pp_degree=pp,
        pp_rank=dist.get_rank() // stage_size,
        stage_group=groups.new_partition(_consecutive_ranks(stage_size), title="stage") if pp > 1 else None,
        groups=groups,
    )


def _consecutive_ranks(size: int) -> list[list[int]]:
    world = range(dist.get_world_size())
    return [list(world[begin : begin + size]) for begin in world[::size]]


def _data_group(groups: OwnedGroups, tp_degree: int, stage_size: int) -> dist.ProcessGroup:
    """The ranks of a stage with the same tp rank. Collective: every rank creates every group, in order."""
    world = dist.group.WORLD
    if world is None:
        raise MeshError("no process group is initialised", hint="create the Engine inside a run, or call weft.train")
    if tp_degree == 1 and stage_size == dist.get_world_size():
        return world
    return _new_data_group(groups, tp_degree, stage_size, title="data parallel")


def _new_data_group(groups: OwnedGroups, tp_degree: int, stage_size: int, *, title: str) -> dist.ProcessGroup:
    rank_lists = [
        list(range(begin + tp_rank, begin + stage_size, tp_degree))
        for begin in range(0, dist.get_world_size(), stage_size)
        for tp_rank in range(tp_degree)
    ]
    return groups.new_partition(rank_lists, title=title)


def describe_mesh(plan: Plan) -> str:
    """'dp_replicate 2 x dp_shard 4', without axes of size one."""
    parts = [f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1]
    return " x ".join(parts) or "one rank"


def default_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
