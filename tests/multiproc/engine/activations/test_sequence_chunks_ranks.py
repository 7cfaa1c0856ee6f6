"""MLPs in chunks of positions on several ranks: the curve of one process without chunks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from tiny import FAMILIES, build_engine, train_steps
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.core.run_spec import ModelSpec

Tables = dict[str, Any]
STEPS, CHUNK = 3, 3  # rows have 16 positions, a rank of two 8
ROTARY = dict(FAMILIES["qwen3-tied"].config)
MODELS = {
    **FAMILIES,
    "gemma3": ModelSpec(type="gemma3_text", config={**ROTARY, "query_pre_attn_scalar": 8, "sliding_window": 8}),
}
FULL = {"policy": "full"}
LAYOUTS: dict[str, tuple[int, str, Tables]] = {
    "cp, dropout": (2, "gpt2", {"mesh": {"cp": 2}, "activations": FULL}),
    "cp, windows": (2, "gemma3", {"mesh": {"cp": 2}}),
    "pp": (2, "gpt2", {"mesh": {"pp": 2}, "activations": FULL}),
    "ZeRO-3": (2, "llama", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}),
    "DDP": (2, "gpt2", {"mesh": {"dp_replicate": 2}}),
}


def curve(_rank: int, _world: int, family: str, tables: Tables) -> list[tuple[float, float]]:
    engine = build_engine(MODELS[family], tables)
    found = train_steps(engine, STEPS)
    engine.close()
    return found


@functools.cache
def alone(family: str) -> list[tuple[float, float]]:
    return curve(0, 1, family, {"pipeline": {"microbatches": 2}})


@pytest.mark.parametrize("name", by_default(["cp, dropout"], list(LAYOUTS), extended=["ZeRO-3", "pp"]))
def test_chunks_have_the_curve_of_one_process(name: str) -> None:
    num_ranks, family, tables = LAYOUTS[name]
    activations = {**tables.get("activations", {}), "sequence_chunk": CHUNK}
    plan = {**tables, "pipeline": {"microbatches": 2}, "activations": activations}
    for found in run_ranks(curve, num_ranks, family, plan, timeout_s=120):
        for (loss, norm), (other_loss, other_norm) in zip(alone(family), found, strict=True):
            assert other_loss == pytest.approx(loss, abs=SAME_CURVE_LOSS_ABS)
            assert other_norm == pytest.approx(norm, rel=SAME_CURVE_NORM_REL)
