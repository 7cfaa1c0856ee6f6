"""The gradient norm and clipping with parameters of every placement at once, against the full tensors."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import run_ranks
from tolerances import SAME_NORM_REL
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from weft.core.plan import Plan
from weft.engine.mesh import build_topology
from weft.engine.optim.clip import clip_factor, global_norm, scale_gradients
from weft.engine.ownership import local, local_index, sharded_axes

CPU = torch.device("cpu")
# shapes with rows that do not divide (5), fewer rows than ranks (1), and a gradient that is not there (None)
SHAPES = [(6, 4), (5, 3), (1, 7), (8,), (3, 2, 2)]


def full_gradient(index: int) -> torch.Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(index)) * (index + 1)


def mixed(rank: int, world: int) -> dict[str, float | list[bool]]:
    topology = build_topology(
        Plan.from_tables({"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}), device_type="cpu"
    )
    mesh = topology.mesh
    placements = [
        (Replicate(), Shard(0)),  # HSDP
        (Shard(0), Replicate()),
        (Shard(0), Shard(0)),  # over all four: one row leaves three ranks empty
        (Replicate(), Replicate()),
        None,  # a plain tensor, alike on every rank
    ]
    parameters = []
    for index, placement in enumerate(placements):
        value = full_gradient(index)
        if placement is None:
            parameter = nn.Parameter(torch.zeros_like(value))
            parameter.grad = value.clone()
        else:
            parameter = nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh, placement, src_data_rank=None))
            parameter.grad = distribute_tensor(value, mesh, placement, src_data_rank=None)
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.ones(3)))  # no gradient
    norm = global_norm({str(index): value for index, value in enumerate(parameters)}, topology, shards={}, device=CPU)
    axes = [sharded_axes(parameter) for parameter in parameters]
    assert axes == [("dp_shard",), ("dp_replicate",), ("dp_replicate", "dp_shard"), (), (), ()]
    right = [
        torch.equal(local(parameter.grad), full_gradient(index)[local_index(parameter)])  # type: ignore[arg-type]
        for index, parameter in enumerate(parameters[:5])
    ]
    scale_gradients(parameters, clip_factor(norm, 1.0))
    assert any(isinstance(parameter.grad, DTensor) for parameter in parameters)
    return {
        "norm": norm.item(),
        "clipped": global_norm(
            {str(index): value for index, value in enumerate(parameters)}, topology, shards={}, device=CPU
        ).item(),
        "right": right,
    }


def test_norm_and_clip_over_mixed_placements() -> None:
    expected = torch.stack([full_gradient(index).double().norm() for index in range(5)]).norm().item()
    found = run_ranks(mixed, 4)
    assert all(answer == found[0] for answer in found)
    assert found[0]["right"] == [True] * 5
    assert found[0]["norm"] == pytest.approx(expected, rel=SAME_NORM_REL)
    assert found[0]["clipped"] == pytest.approx(1.0, rel=10 * SAME_NORM_REL)


def large(rank: int, world: int) -> float:
    topology = build_topology(Plan.from_tables({"mesh": {"dp_shard": 2}}), device_type="cpu")
    parameter = nn.Parameter(torch.zeros(4_000_000))
    parameter.grad = torch.randn(4_000_000, generator=torch.Generator().manual_seed(1))
    right = parameter.grad.double().norm().item()
    return abs(global_norm({"p": parameter}, topology, shards={}, device=CPU).item() - right) / right


def test_the_norm_of_millions_of_elements_is_exact() -> None:
    """torch's float32 kernel for a CPU is 3e-4 off, and other layouts otherwise: shards are smaller."""
    assert max(run_ranks(large, 2)) < SAME_NORM_REL


def nothing(rank: int, world: int) -> tuple[float, float]:
    topology = build_topology(Plan.from_tables({"mesh": {"dp_shard": 2}}), device_type="cpu")
    parameter = nn.Parameter(distribute_tensor(torch.zeros(1, 4), topology.mesh, (Shard(0),)))
    before = global_norm({"p": parameter}, topology, shards={}, device=CPU).item()
    scale_gradients([parameter], torch.tensor(0.5))  # nothing to scale is no error
    parameter.grad = distribute_tensor(torch.full((1, 4), 2.0), topology.mesh, (Shard(0),))
    return before, global_norm({"p": parameter}, topology, shards={}, device=CPU).item()


def test_no_gradients_at_all_and_a_rank_without_rows() -> None:
    assert run_ranks(nothing, 2) == [(0.0, 4.0)] * 2
