"""Grids have the curve of one process through the engine: alone, with every data-parallel strategy, with recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

STEPS = 3
Curve = list[tuple[float, float]]


def tables(mode: str, tp: int, **rest: Any) -> dict[str, Any]:
    mesh = {"tp": tp, **rest.pop("mesh", {})}
    return {"mesh": mesh, "tensor_parallel": {"mode": mode}, "pipeline": {"microbatches": 2}, **rest}


TWICE = {"dp_replicate": 2}
# on eight ranks; GPT-2 has dropout, which the cube refuses
FEW = {
    "2d x ZeRO-3": tables("2d", 4, mesh={"dp_shard": 2}, data_parallel={"zero": 3}),
    "2.5d, selective recompute": tables("2.5d", 8, activations={"policy": "selective"}),
    "3d, full recompute": tables("3d", 8, activations={"policy": "full"}),
}
MORE = {
    "2d x ZeRO-1": tables("2d", 4, mesh={"dp_shard": 2}, data_parallel={"zero": 1}),
    "2d x ZeRO-2": tables("2d", 4, mesh={"dp_shard": 2}, data_parallel={"zero": 2}),
    "3d, selective recompute": tables("3d", 8, activations={"policy": "selective"}),
}
SQUARES = {
    "2d x DDP": tables("2d", 4, mesh=TWICE),
    "2d x DDP, full recompute": tables("2d", 4, mesh=TWICE, activations={"policy": "full"}),
    "2.5d": tables("2.5d", 8),
}


def curve(family: str, plan: dict[str, Any]) -> Curve:
    """The steps, and at the end an evaluation."""
    engine = build_engine(family, plan)
    found = train_steps(engine, STEPS)
    return [*found, (engine.evaluate(engine.share_of(global_batch(99))).loss, 1.0)]


def curves(rank: int, world: int, family: str, plans: dict[str, dict[str, Any]]) -> dict[str, Curve]:
    found = {name: curve(family, plan) for name, plan in plans.items()}
    dist.barrier()
    return found


def single(rank: int, world: int, family: str) -> Curve:
    return curve(family, {"pipeline": {"microbatches": 2}})


@pytest.mark.parametrize(
    ("family", "plans"),
    [
        pytest.param("qwen3-tied", FEW, marks=pytest.mark.extended),
        pytest.param("llama", MORE, marks=pytest.mark.slow),
        pytest.param("gpt2", SQUARES, marks=pytest.mark.slow),
    ],
)
def test_the_curve_of_one_process(family: str, plans: dict[str, dict[str, Any]]) -> None:
    truth = run_ranks(single, 1, family)[0]
    everywhere = run_ranks(curves, 8, family, plans, timeout_s=240)
    assert all(found == everywhere[0] for found in everywhere)
    for name, found in everywhere[0].items():
        for (loss, norm), (right_loss, right_norm) in zip(found, truth, strict=True):
            assert loss == pytest.approx(right_loss, abs=SAME_CURVE_LOSS_ABS), name
            assert norm == pytest.approx(right_norm, rel=SAME_CURVE_NORM_REL), name
