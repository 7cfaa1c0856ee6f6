"""Gradients that ranks share: summed, also where a rank has used a parameter that another has not."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import nn

from weft.core.shards import replicated_shard
from weft.engine.tp.gradients import sum_partial_gradients
from weft.engine.tp.grid import TP_GROUP, Grid

# gradients of [rank 0, rank 1]; none: the rank did not use it. The two of equal size must not be taken for each other.
GIVEN: dict[str, list[float | None]] = {
    "norm": [1.0, 2.0],
    "first": [3.0, None],
    "second": [None, 4.0],
    "idle": [None, None],
}


def sum_in_rank(rank: int, world: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    grid = Grid(mode="1d", sizes={"t": world}, place={"t": rank}, groups={TP_GROUP: group})
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in (*GIVEN, "alike")}
    shards = {name: replicated_shard((3,), copies=world, summed_over=TP_GROUP) for name in GIVEN}
    shards["alike"] = replicated_shard((3,), copies=world)
    for name, values in GIVEN.items():
        value = values[rank]
        parameters[name].grad = None if value is None else torch.full((3,), value)
    parameters["alike"].grad = torch.full((3,), 7.0)
    sum_partial_gradients(parameters, shards, grid)
    return {name: None if value.grad is None else value.grad.tolist() for name, value in parameters.items()}


def test_every_rank_has_the_sum_of_those_that_had_one() -> None:
    right = {"norm": [3.0] * 3, "first": [3.0] * 3, "second": [4.0] * 3, "idle": None, "alike": [7.0] * 3}
    assert run_ranks(sum_in_rank, 2) == [right, right]
