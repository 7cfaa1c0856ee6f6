"""Expert parallelism under ZeRO: the curve of one process, and checkpoints from any degree to any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import FAMILIES
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL
from transformers import AutoModelForCausalLM

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config

STEPS = 4
Curve = list[tuple[float, float]]


def plan(world: int, ep: int, zero: int, **tables: Any) -> dict[str, Any]:
    return {"mesh": {"dp_shard": world, "ep": ep}, "data_parallel": {"zero": zero}, **tables}


PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"alone": {}},
    2: {
        "ZeRO-1": plan(2, 2, 1),
        "ZeRO-3": plan(2, 2, 3),
        "pairs": plan(2, 2, 3, expert_parallel={"dispatcher": "pairs"}),
        "gather, selective recompute": plan(
            2, 2, 2, expert_parallel={"dispatcher": "gather"}, activations={"policy": "selective"}
        ),
        "a fused loss": plan(2, 2, 3, kernels={"loss": "fused"}),
    },
    4: {
        "ep 2, ZeRO-2": plan(4, 2, 2, pipeline={"microbatches": 2}),
        "ep 2, ZeRO-3, recompute": plan(4, 2, 3, activations={"policy": "full"}),
        "ep 4": plan(4, 4, 3),
        "pp 2": {
            "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
            "data_parallel": {"zero": 2},
            "pipeline": {"schedule": "1f1b", "microbatches": 2},
        },
        "zero bubble": {
            "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
            "data_parallel": {"zero": 3},
            "pipeline": {"schedule": "zero_bubble", "microbatches": 4},
            "expert_parallel": {"dispatcher": "gather"},
        },
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
    },
}


def build(tables: dict[str, Any]) -> Engine:
    return build_engine("mixtral", tables)


def curves(rank: int, world: int) -> dict[str, Curve]:
    return {name: train_steps(build(tables), STEPS) for name, tables in PLANS[world].items()}


def test_every_layout_has_the_curve_of_one_process() -> None:
    expected = run_ranks(curves, 1)[0]["alone"]
    for world in (2, 4):
        for name, found in run_ranks(curves, world, timeout_s=120.0)[0].items():
            for (loss, norm), (other_loss, other_norm) in zip(expected, found, strict=True):
                assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS), (world, name)
                assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL), (world, name)


def recomputed(rank: int, world: int, family: str) -> dict[str, list[float]]:
    config = build_config(ModelSpec(type=family, config=FAMILIES[family]), vocab_size=128)
    found = {}
    for policy in ("none", "selective"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        tables = plan(2, 2, 3, activations={"policy": policy})
        engine = Engine(model, Plan.from_tables(tables), optimizer=OptimizerPolicy(), seed=0)
        ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(rank))
        found[policy] = [engine.step({"input_ids": ids, "labels": ids}).loss for _ in range(3)]
    return found


# shared experts, whose backward begins before that of the others; biases that are added in place
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_selective_recompute_changes_no_bit(family: str) -> None:
    found = run_ranks(recomputed, 2, family)[0]
    assert found["selective"] == found["none"]


def hand_on(rank: int, world: int, folder: str, tables: dict[str, Any], source: str, to: str) -> Curve:
    engine = build(tables)
    if source:
        engine.load(Path(folder) / source)
    else:
        train_steps(engine, 2)
    engine.save(Path(folder) / to)
    return train_steps(engine, 2, first=2)


def test_a_checkpoint_goes_to_any_degree(tmp_path: Path) -> None:
    chain = [(4, plan(4, 2, 3)), (2, plan(2, 2, 3)), (4, plan(4, 4, 1)), (1, {}), (2, plan(2, 1, 3))]
    found, source = [], ""
    for at, (world, tables) in enumerate(chain):
        found.append(run_ranks(hand_on, world, str(tmp_path), tables, source, str(at))[0])
        source = str(at)
    for curve in found[1:]:
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in found[0]], abs=SAME_CURVE_LOSS_ABS)


def coverage(rank: int, world: int) -> list[tuple[tuple[str, ...], tuple[str, ...], int]]:
    rows = [row for row in build(plan(4, 2, 3)).coverage() if ".experts." in row.name]
    return [(row.sharded_axes, row.replicated_axes, row.local_elements) for row in rows]


def test_coverage_names_the_axes_of_experts() -> None:
    for found in run_ranks(coverage, 4):
        assert {(sharded, replicated) for sharded, replicated, _ in found} == {(("edp", "ep"), ())}
