"""Sides, places and neighbours on the grids of tensor parallelism."""

from __future__ import annotations

import math

import pytest

from weft.core.errors import PlanError
from weft.core.tensor_grid import grid_sizes, members, place_of, rank_at, tensor_depth

GRIDS = [("1d", 6), ("2d", 4), ("2d", 9), ("2.5d", 8), ("2.5d", 27), ("2.5d", 32), ("3d", 8), ("3d", 27)]


@pytest.mark.parametrize(
    ("mode", "degree", "sides"),
    [("1d", 6, [6]), ("2d", 16, [4, 4]), ("2.5d", 8, [2, 2, 2]), ("2.5d", 32, [2, 4, 4]), ("3d", 27, [3, 3, 3])],
)
def test_sides(mode: str, degree: int, sides: list[int]) -> None:
    assert list(grid_sizes(mode, degree).values()) == sides


@pytest.mark.parametrize(("degree", "depth"), [(1, None), (4, None), (8, 2), (12, None), (16, None), (18, 2), (64, 4)])
def test_the_deepest_stack_that_is_not_higher_than_wide(degree: int, depth: int | None) -> None:
    assert tensor_depth(degree) == depth


@pytest.mark.parametrize(("mode", "degree"), GRIDS)
def test_every_rank_has_one_place(mode: str, degree: int) -> None:
    sizes = grid_sizes(mode, degree)
    places = [place_of(sizes, rank) for rank in range(degree)]
    assert [rank_at(sizes, place) for place in places] == list(range(degree))
    assert len({tuple(place.values()) for place in places}) == degree


@pytest.mark.parametrize(("mode", "degree"), GRIDS)
def test_groups_of_one_coordinate_cover_the_grid_once(mode: str, degree: int) -> None:
    sizes = grid_sizes(mode, degree)
    for name, size in sizes.items():
        groups = {tuple(members(sizes, place_of(sizes, rank), name)) for rank in range(degree)}
        assert sorted(rank for group in groups for rank in group) == list(range(degree))
        assert {len(group) for group in groups} == {size}


def test_the_order_of_a_group_of_two_coordinates_is_the_order_of_its_rows() -> None:
    """Tables of the cube gather rows over "ij": chunk i q + j must be the rank's turn in the group."""
    sizes = grid_sizes("3d", 8)
    for rank in range(8):
        place = place_of(sizes, rank)
        assert members(sizes, place, "ij").index(rank) == place["i"] * 2 + place["j"]
        assert members(sizes, place, "ik").index(rank) == place["i"] * 2 + place["k"]


@pytest.mark.parametrize(("mode", "degree", "named"), [("2d", 8, "4, 9"), ("2.5d", 4, "8"), ("3d", 9, "8")])
def test_no_such_grid(mode: str, degree: int, named: str) -> None:
    with pytest.raises(PlanError) as caught:
        grid_sizes(mode, degree)
    assert named in caught.value.hint
    assert math.prod(grid_sizes(mode, int(named.split(",")[0])).values()) == int(named.split(",")[0])
