"""The ranks of a plan as a device mesh with named axes, and the groups that data and losses are reduced over.

Ranks that share rows of data are neighbours (tp is innermost); `dp_group` has the ranks of equal tp rank.

Topology is passed as this value; nothing in the engine reads ranks from a module global or the environment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# "For debugging", and no public form: see `Topology.close`. tests/multiproc/engine/test_close.py fails when it moves.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from weft.comm.coded_sums import Nodes
from weft.comm.groups import OwnedGroups
from weft.comm.sums import Ways
from weft.core import axes
from weft.core.errors import MeshError
from weft.core.plan import Plan
from weft.engine.axis import AxisContext

_SAVE_TIMEOUT = timedelta(minutes=30)  # a slow disk is not a hang: ranks wait here while others write


class ReplicatedAxis(AxisContext):
    """A registered axis that declares nothing else: its ranks compute the same values, and the first one's count."""

    def __init__(self, axis: str, *, is_first: bool) -> None:
        self.axis, self.owns_loss = axis, is_first

    @property
    def owns_weight(self) -> bool:
        return self.owns_loss


class ContextGroups(NamedTuple):
    """The context-parallel ranks: all, the neighbours that exchange heads, those between which keys and values travel.

    None: this rank alone.
    """

    whole: dist.ProcessGroup
    heads: dist.ProcessGroup | None
    keys: dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Topology:
    """This rank's place in the mesh. `dp_group`: the ranks with different rows of the same global batch.

    `mesh` places parameters: context-parallel ranks share one copy of the states, so its axis of shards (of replicas,
    without shards) has them too. `gradient_group`: all ranks whose gradients of the same parameters are partial sums.
    """

    mesh: DeviceMesh
    dp_group: dist.ProcessGroup
    dp_rank: int
    dp_degree: int
    gradient_group: dist.ProcessGroup
    cp_degree: int = 1
    context: ContextGroups | None = None
    tp_degree: int = 1
    pp_degree: int = 1
    pp_rank: int = 0
    stage_group: dist.ProcessGroup | None = None  # ranks that share this rank's stages; None: all ranks do
    groups: OwnedGroups = field(default_factory=OwnedGroups)  # all groups created for this topology
    expert_mesh: DeviceMesh | None = None  # dp_shard x cp (x tp) as edp x ep, in expert parallelism
    expert_group: dist.ProcessGroup | None = None  # the ranks of ep
    splits_replicas: bool = False  # `fully_shard` does not get the axis of replicas (see `dp/sharded.py`)
    more_axes: dict[str, str] = field(default_factory=dict)  # names of further groups -> what traffic calls them

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
        """The mesh of `fully_shard`."""
        known = (axes.DP_SHARD,) if self.splits_replicas else axes.DATA_AXES
        names = tuple(name for name in self.axis_names if name in known)
        return self.mesh if names == self.axis_names else self.mesh[names]

    @property
    def expert_dp_mesh(self) -> DeviceMesh | None:
        """The mesh of `fully_shard` for experts: the ranks that hold the same ones."""
        if self.expert_mesh is None:
            return None
        known = (axes.EDP,) if self.splits_replicas else (axes.DP_REPLICATE, axes.EDP)
        return self.expert_mesh[tuple(name for name in self.expert_mesh.mesh_dim_names or () if name in known)]

    @property
    def replicas_beside_shards(self) -> dist.ProcessGroup | None:
        """The replicas of this rank's shards that are not in `dp_mesh`; None if there are none."""
        is_left_out = self.splits_replicas and axes.DP_REPLICATE in self.axis_names
        return self.group(axes.DP_REPLICATE) if is_left_out else None

    @property
    def tp_rank_lists(self) -> list[list[int]]:
        """The global ranks of every tp group, in order."""
        return rank_lists(self.mesh, (axes.TP,))

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.mesh.mesh_dim_names or ())

    def axis_names_of(self, sharded: Sequence[str]) -> tuple[str, ...]:
        """The axes of the mesh that places a parameter with these sharded axes: experts have their own."""
        if self.expert_mesh is None or axes.EP not in sharded:
            return self.axis_names
        names = zip(self.expert_mesh.mesh_dim_names or (), self.expert_mesh.shape, strict=True)
        return tuple(name for name, size in names if size > 1 or name in sharded)

    def replicated_axes(self) -> list[ReplicatedAxis]:
        """The registered axes of this mesh."""
        return [
            ReplicatedAxis(axis, is_first=self.mesh.get_local_rank(axis) == 0)
            for axis in self.axis_names
            if axis in axes.REGISTERED
        ]

    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """A separate Gloo group for saves in the background: sharing one with training deadlocks. Collective."""
        if dist.get_world_size() == 1:
            return None
        return self.groups.new(title="checkpoint", backend="gloo", timeout=_SAVE_TIMEOUT)

    def new_data_group(self) -> dist.ProcessGroup:
        """A second group of the ranks of `dp_group`, with a queue separate from that of gradients. Collective."""
        return self.groups.new_partition(rank_lists(self.mesh, axes.DATA_AXES), title="buffers")

    def new_neighbours(self, size: int) -> dist.ProcessGroup:
        """The `size` adjacent shards that share a secondary shard (`dp/secondary.py`). Collective."""
        shards = rank_lists(self.mesh, (axes.DP_SHARD,))
        lists = [ranks[at : at + size] for ranks in shards for at in range(0, len(ranks), size)]
        group = self.groups.new_partition(lists, title="secondary shard")
        self.more_axes[str(group.group_name)] = axes.DP_SHARD
        return group

    def new_nodes(self, size: int, axis_names: Sequence[str]) -> Nodes:
        """The groups of sums by node among the ranks of some axes, `size` adjacent ones on each. Collective."""
        lists = rank_lists(self.mesh, axis_names)
        near = [ranks[at : at + size] for ranks in lists for at in range(0, len(ranks), size)]
        far = [ranks[at::size] for ranks in lists for at in range(size)]
        inside = self.groups.new_partition(near, title="sums inside nodes")
        between = self.groups.new_partition(far, title="sums between nodes")
        self.more_axes.update({str(inside.group_name): axes.DP_INSIDE, str(between.group_name): axes.DP_BETWEEN})
        return Nodes(inside, between)

    def new_ways(self, axis_names: Sequence[str]) -> Ways:
        """Groups for messages among the ranks of some axes. Collective."""
        lists = rank_lists(self.mesh, axis_names)
        up, down = (self.groups.new_partition(lists, title=f"gradients, {way}") for way in ("up", "down"))
        return Ways(up=up, down=down)

    def group(self, axis: str) -> dist.ProcessGroup:
        if axis == axes.EP and self.expert_group is not None:
            return self.expert_group
        if axis == axes.EDP and self.expert_mesh is not None:
            return self.expert_mesh.get_group(axis)
        return self.mesh.get_group(axis)

    @property
    def group_axes(self) -> dict[str, str]:
        """Group name -> axis: those of the mesh, and those of experts, which have groups of their own."""
        meshes = [(self.mesh, self.axis_names)]
        if self.expert_mesh is not None:
            meshes.append((self.expert_mesh, tuple(self.expert_mesh.mesh_dim_names or ())))
        known = {str(mesh.get_group(axis).group_name): axis for mesh, names in reversed(meshes) for axis in names}
        return known | self.more_axes

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
    elif plan.mesh.dp_degree == 1 and plan.num_ranks > 1:
        sizes.setdefault(axes.DP_REPLICATE, 1)  # every mesh has a data axis
    ordered = {axis: sizes[axis] for axis in axes.MESH_ORDER if axis in sizes} or {axes.DP_REPLICATE: 1}
    folded = _with_context_folded(ordered)
    mesh = init_device_mesh(device_type, tuple(folded.values()), mesh_dim_names=tuple(folded))
    groups = OwnedGroups()
    groups.adopt(mesh.get_all_groups())
    expert_mesh, expert_group = _expert_mesh(ordered, plan, device_type=device_type), None
    if expert_mesh is not None:
        groups.adopt(expert_mesh.get_all_groups())
        # of its own: over all ranks a mesh takes the group of the world, whose queue is that of weights and gradients
        expert_group = groups.new_partition(rank_lists(expert_mesh, (axes.EP,)), title="expert parallel")
    data_ranks = ranks_over(ordered, axes.DATA_AXES)
    own = next(ranks for ranks in data_ranks if dist.get_rank() in ranks)
    dp_group, pp, has_context = _data_group(groups, data_ranks), plan.mesh.pp, axes.CP in ordered
    of_stage = [axis for axis in ordered if axis != axes.PP]
    return Topology(
        mesh=mesh,
        dp_group=dp_group,
        dp_rank=own.index(dist.get_rank()),
        dp_degree=plan.mesh.dp_degree,
        gradient_group=_data_group(groups, rank_lists(mesh, axes.DATA_AXES)) if has_context else dp_group,
        cp_degree=plan.mesh.cp,
        context=_context_groups(groups, ranks_over(ordered, (axes.CP,)), plan) if has_context else None,
        tp_degree=plan.mesh.tp,
        pp_degree=pp,
        pp_rank=dist.get_rank() // (world_size // pp),
        stage_group=groups.new_partition(ranks_over(ordered, of_stage), title="stage") if pp > 1 else None,
        groups=groups,
        expert_mesh=expert_mesh,
        expert_group=expert_group,
        splits_replicas=pp > 1 or (plan.data_parallel.zero > 0 and plan.precision.policy().has_coded_sums),
    )


def _context_groups(groups: OwnedGroups, lists: list[list[int]], plan: Plan) -> ContextGroups:
    """Collective. Neighbours exchange heads: they are on one node if any are."""
    cp, size = plan.mesh.cp, plan.context_parallel.head_ranks(plan.mesh.cp)
    whole = groups.new_partition(lists, title="context")
    if size in (1, cp):
        return ContextGroups(whole, *((whole, None) if size == cp else (None, whole)))
    near = [ranks[at : at + size] for ranks in lists for at in range(0, cp, size)]
    far = [ranks[place::size] for ranks in lists for place in range(size)]
    heads = groups.new_partition(near, title="context, heads")
    return ContextGroups(whole, heads, groups.new_partition(far, title="context, keys"))


def _expert_mesh(sizes: dict[str, int], plan: Plan, *, device_type: str) -> DeviceMesh | None:
    """The same ranks with the axes of experts as edp x ep: neighbours hold different experts."""
    ep = plan.mesh.ep
    if ep == 1:
        return None
    pool = [axis for axis in sizes if axis in plan.expert_parallel.axis_names]
    pool_size = math.prod(sizes[axis] for axis in pool)
    if pool_size % ep:
        raise MeshError(
            f"mesh.ep = {ep} does not divide {' x '.join(plan.expert_parallel.axis_names)} = {pool_size}",
            hint="experts are divided over the ranks of these axes; set mesh.ep to a divisor",
        )
    divided: dict[str, int] = {}
    for axis, size in sizes.items():  # the axes of experts are neighbours in the order of the mesh
        divided |= {axes.EDP: pool_size // ep, axes.EP: ep} if axis in pool else {axis: size}
    return init_device_mesh(device_type, tuple(divided.values()), mesh_dim_names=tuple(divided))


def _with_context_folded(sizes: dict[str, int]) -> dict[str, int]:
    """The sizes with cp inside its neighbour, the axis of shards or else of replicas."""
    neighbour = axes.DP_SHARD if axes.DP_SHARD in sizes else axes.DP_REPLICATE
    cp = sizes.get(axes.CP, 1)
    return {axis: size * cp if axis == neighbour else size for axis, size in sizes.items() if axis != axes.CP}


def rank_lists(mesh: DeviceMesh, over: Sequence[str]) -> list[list[int]]:
    """The global ranks that differ in the axes `over` alone, list by list in the order of the mesh."""
    return ranks_over(dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)), over)


def ranks_over(sizes: dict[str, int], over: Sequence[str]) -> list[list[int]]:
    """As `rank_lists`, for a mesh of these sizes."""
    moved = [dim for dim, name in enumerate(sizes) if name in over]
    kept = [dim for dim, name in enumerate(sizes) if name not in over]
    shape = tuple(sizes.values())
    length = math.prod(shape[dim] for dim in moved)
    ranks = np.arange(math.prod(shape)).reshape(shape)  # no tensor: a dry run's would be fake
    lists: list[list[int]] = ranks.transpose(*kept, *moved).reshape(-1, length).tolist()
    return lists


def _data_group(groups: OwnedGroups, data_ranks: list[list[int]]) -> dist.ProcessGroup:
    """The ranks with different rows. Collective: every rank creates every group, in order."""
    world = dist.group.WORLD
    if world is None:
        raise MeshError("no process group is initialised", hint="create the Engine inside a run, or call weft.train")
    return world if len(data_ranks) == 1 else groups.new_partition(data_ranks, title="data parallel")


def describe_mesh(plan: Plan) -> str:
    """'dp_replicate 2 x dp_shard 4', without axes of size one."""
    parts = [f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1]
    return " x ".join(parts) or "one rank"


def select_device(given: torch.device | str | None) -> torch.device:
    """The device of an engine. A GPU becomes the process's current one: meshes and NCCL would choose theirs by rank."""
    device = torch.device(given) if given is not None else default_device()
    if device.type == "cuda" and torch.cuda.is_available():  # else a dry run of a GPU
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def default_device() -> torch.device:
    """The GPU of this process if there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
