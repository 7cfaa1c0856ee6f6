"""Fewer experts than ranks: ZeRO shards them along another dimension; curve, checkpoints and coverage follow."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny import CPU, train_steps
from tolerances import LOWBIT_SAME_LOSS_ABS, SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import Kind, OptimizerPolicy
from weft.engine.ownership import chunks_of, local
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.verify.evidence import full_tensor

# two experts [2, 96, 64] and [2, 64, 48]; the last dimension of the first has blocks of 8-bit moments
MIXTRAL = ModelSpec(
    type="mixtral",
    config={
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
)
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
STEPS = 4
KINDS: tuple[Kind, ...] = ("adamw", "adamw8bit")
# by number of experts; tensor parallelism shards the same dimension of three experts, in two segments
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ZeRO-2": {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 2}},
        "ZeRO-3, full recompute": {
            "mesh": {"dp_shard": 4},
            "data_parallel": {"zero": 3},
            "activations": {"policy": "full"},
            "pipeline": {"microbatches": 2},
        },
    },
    3: {
        "HSDP": {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}},
        "tp 2": {"mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}},
    },
}


def build(tables: dict[str, Any], *, kind: Kind = "adamw", experts: int = 2) -> Engine:
    spec = ModelSpec(type="mixtral", config={**MIXTRAL.config, "num_local_experts": experts})
    config = build_config(spec, vocab_size=257)
    skeleton = build_skeleton(config)
    return Engine(
        build_skeleton(config),
        Plan.from_tables(tables),
        optimizer=OptimizerPolicy(kind=kind, learning_rate=1e-3),
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=CPU),
        device=CPU,
    )


def zero3(world: int) -> dict[str, Any]:
    return {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}} if world > 1 else {}


Curve = list[tuple[float, float]]


def curves(rank: int, world: int) -> dict[tuple[int, str], Curve]:
    plans = PLANS if world == 4 else {experts: {"alone": {}} for experts in PLANS}
    return {
        (experts, name): train_steps(build(tables, experts=experts), STEPS)
        for experts, of_model in plans.items()
        for name, tables in of_model.items()
    }


@pytest.mark.slow
def test_two_experts_on_four_ranks_have_the_curve_of_one_process() -> None:
    expected = run_ranks(curves, 1)[0]
    for (experts, name), found in run_ranks(curves, 4, timeout_s=120.0)[0].items():
        for (loss, norm), (other_loss, other_norm) in zip(expected[experts, "alone"], found, strict=True):
            assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS), (experts, name)
            assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL), (experts, name)


def shards(rank: int, world: int, experts: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str]:
    engine = build(zero3(world), experts=experts)
    parameter = engine.model.get_parameter(EXPERTS)
    (chunk,) = chunks_of(parameter, None)
    row = next(row for row in engine.coverage() if row.name == EXPERTS)
    assert row.local_elements == local(parameter).numel()
    return tuple(local(parameter).shape), chunk.offsets, chunk.sizes, ",".join(row.sharded_axes)


@pytest.mark.parametrize("experts", [2, pytest.param(6, marks=pytest.mark.extended)])
def test_shards_are_equal_where_experts_do_not_divide(experts: int) -> None:
    shape = (experts, 24, 64)
    expected = [(shape, (0, 24 * rank, 0), shape, "dp_shard") for rank in range(4)]
    assert run_ranks(shards, 4, experts) == expected


def test_experts_that_divide_are_sharded_by_experts() -> None:
    found = run_ranks(shards, 4, 8)
    assert [offsets for _, offsets, _, _ in found] == [(2 * rank, 0, 0) for rank in range(4)]


def digests(engine: Engine) -> dict[str, str]:
    found = {}
    for name, tensor in engine.state().items():
        full = full_tensor(tensor, engine)
        found[name] = f"{tuple(full.shape)} {hashlib.sha256(full.numpy().tobytes()).hexdigest()}"
    return found


EXPERT_PARALLEL = {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}}
CHAIN: dict[str, tuple[int, dict[str, Any]]] = {
    "four": (4, zero3(4)),
    "two": (2, zero3(2)),
    "two with experts of their own": (2, EXPERT_PARALLEL),
    "one": (1, {}),
}


def hand_on(rank: int, world: int, folder: str, source: str, to: str) -> dict[str, tuple[dict[str, str], Curve]]:
    """Load what `source` has saved (none: train first), save it again, continue."""
    found = {}
    for kind in KINDS:
        engine = build(CHAIN[to][1], kind=kind)
        if source:
            engine.load(Path(folder) / f"{kind}-{source}")
        else:
            train_steps(engine, 2)
        engine.save(Path(folder) / f"{kind}-{to}")
        state = digests(engine)
        found[kind] = state, train_steps(engine, 2, first=2)
    return found


@pytest.mark.extended
def test_a_checkpoint_goes_through_all_layouts(tmp_path: Path) -> None:
    """8-bit moments, too: whether a tensor has them depends on its full shape alone."""
    names = list(CHAIN)
    expected = run_ranks(hand_on, 4, str(tmp_path), "", names[0])[0]
    assert f"optim.{EXPERTS}.exp_avg.codes" in expected["adamw8bit"][0]
    for source, to in pairwise(names):
        for kind, (state, curve) in run_ranks(hand_on, CHAIN[to][0], str(tmp_path), source, to)[0].items():
            assert state == expected[kind][0], (kind, to)
            bound = LOWBIT_SAME_LOSS_ABS if kind == "adamw8bit" else SAME_CURVE_LOSS_ABS
            assert [a for a, _ in curve] == pytest.approx([a for a, _ in expected[kind][1]], abs=bound), (kind, to)
