"""A rank's place on the tp axis, and its process groups there. Topology only, no model.

    1d t,   2d (i, j),   2.5d (d, i, j),   3d (i, j, k): see `core.tensor_grid`

A group is named by the coordinates that vary in it: "j" is a row of the square, "i" a column, "d" the same place on all
layers, "di" all ranks with the same features; "tp" is the full axis. "repeat2" is a pair of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from weft.comm.groups import OwnedGroups
from weft.core.tensor_grid import grid_sizes, members, place_of, rank_at

TP_GROUP = "tp"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The tp axis of one rank. `sizes` and `place` are by coordinate name; `groups` by the names that vary."""

    mode: str
    sizes: dict[str, int]
    place: dict[str, int]
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def degree(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def rank(self) -> int:
        return rank_at(self.sizes, self.place)

    def group(self, varying: str) -> dist.ProcessGroup:
        return self.groups[varying]


def build_grid(
    mode: str,
    axis_group: dist.ProcessGroup,
    *,
    axis_ranks: list[list[int]],
    repeats: Iterable[int] = (),
    owner: OwnedGroups | None = None,
) -> Grid:
    """The grid of this rank. Collective over the world: `axis_ranks` lists the global ranks of every tp group.

    `owner` destroys the groups created here; without one they live as long as the world.
    """
    owner = owner if owner is not None else OwnedGroups()
    degree = dist.get_world_size(axis_group)
    sizes = grid_sizes(mode, degree)
    place = place_of(sizes, dist.get_rank(axis_group))
    groups = {TP_GROUP: axis_group}
    for name in _subsets(mode):
        subgroups = [ranks for axis in axis_ranks for ranks in _subgroups(axis, sizes, name)]
        groups[name] = owner.new_partition(subgroups, title="tp grid")
    for count in sorted(set(repeats)):
        neighbours = [axis[at : at + count] for axis in axis_ranks for at in range(0, degree, count)]
        groups[f"repeat{count}"] = owner.new_partition(neighbours, title="tp grid")
    return Grid(mode=mode, sizes=sizes, place=place, groups=groups)


def _subsets(mode: str) -> tuple[str, ...]:
    return {"1d": (), "2d": ("i", "j"), "2.5d": ("d", "i", "j", "di"), "3d": ("i", "j", "k", "ij", "ik")}[mode]


def _subgroups(axis: list[int], sizes: dict[str, int], varying: str) -> list[list[int]]:
    """The global ranks of one tp group, partitioned into groups that vary in `varying`."""
    groups = {tuple(members(sizes, place_of(sizes, rank), varying)) for rank in range(len(axis))}
    return [[axis[rank] for rank in group] for group in sorted(groups)]
