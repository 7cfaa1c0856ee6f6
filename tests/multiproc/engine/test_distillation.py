"""Distillation has the curve of one process under data parallelism: every rank asks the teacher about its own rows."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.core.objective_spec import ObjectiveSpec
from weft.engine.distillation import Distillation

STEPS = 4
SPEC = ObjectiveSpec(kind="distillation", teacher="x", temperature=2.0)
PLANS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    "tp": {"mesh": {"tp": 2}, "tensor_parallel": {"loss_parallel": False}},
    "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
}


def curves(_rank: int, world: int, names: list[str]) -> dict[str, list[tuple[float, float]]]:
    found = {}
    for name in names:
        teacher = build_engine("qwen3-tied", {"mesh": {"dp_replicate": world}}, seed=7).model.eval()
        engine = build_engine("qwen3-tied", PLANS.get(name, {}), objective=Distillation(SPEC, teacher))
        found[name] = train_steps(engine, STEPS)
    dist.barrier()
    return found


def test_distillation_has_the_curve_of_one_process() -> None:
    expected = run_ranks(curves, 1, ["one"])[0]["one"]
    of_two = run_ranks(curves, 2, [name for name in PLANS if name != "HSDP"], timeout_s=120.0)[0]
    of_four = run_ranks(curves, 4, ["HSDP"], timeout_s=120.0)[0]
    for name, found in {**of_two, **of_four}.items():
        for one, other in zip(expected, found, strict=True):
            assert abs(one[0] - other[0]) <= SAME_CURVE_LOSS_ABS, name
            assert abs(one[1] - other[1]) <= SAME_CURVE_NORM_REL * one[1], name
    assert len({loss for loss, _ in expected}) == STEPS
