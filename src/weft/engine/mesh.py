"""The ranks of a plan as a device mesh with named axes, and the groups that data and losses are reduced over.

Topology is passed as this value; nothing in the engine reads ranks from a module global or the environment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from weft.core import axes
from weft.core.errors import MeshError
from weft.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where this rank stands. `dp_group` spans the ranks that see different rows of the same global batch."""

    mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_degree: int

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names or ())

    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """A Gloo group of its own for saves in the background: sharing one with training deadlocks. Collective."""
        return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.mesh.get_group(axis)


def build_topology(plan: Plan, *, device_type: str) -> Topology:
    """The mesh of `plan` over the ranks that are there."""
    world_size = dist.get_world_size()
    if plan.num_ranks != world_size:
        raise MeshError(
            f"the plan's mesh has {plan.num_ranks} ranks ({describe_mesh(plan)}) but {world_size} are running",
            hint=f"start {plan.num_ranks} ranks (--nproc {plan.num_ranks}) or give [mesh] a product of {world_size}",
        )
    sizes = {axis: size for axis, size in plan.mesh.sizes().items() if size > 1}
    if plan.data_parallel.zero > 0:
        sizes.setdefault(axes.DP_SHARD, 1)  # fully_shard needs its axis even on one rank
    ordered = {axis: sizes[axis] for axis in axes.MESH_ORDER if axis in sizes} or {axes.DP_REPLICATE: 1}
    mesh = init_device_mesh(device_type, tuple(ordered.values()), mesh_dim_names=tuple(ordered))
    world = dist.group.WORLD
    if world is None:
        raise MeshError("no process group is initialised", hint="create the Engine inside a run, or call weft.train")
    # Every axis built so far is a data axis, so the data-parallel group is the world.
    return Topology(mesh=mesh, dp_group=world, dp_rank=dist.get_rank(), dp_degree=plan.mesh.dp_degree)


def describe_mesh(plan: Plan) -> str:
    """'dp_replicate 2 x dp_shard 4', leaving out axes of one."""
    parts = [f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1]
    return " x ".join(parts) or "one rank"
