"""A resumed run has the bits of the uninterrupted one, also where the order of a sum matters: four ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from tiny import build_engine, train_steps

from weft.engine.engine import Engine
from weft.engine.ownership import local


def resume(rank: int, world: int, plan: dict[str, Any], folder: str) -> tuple[list[Any], list[Any]]:
    straight = build_engine("llama", plan)
    train_steps(straight, 2)
    straight.save(folder)
    expected = [*train_steps(straight, 3, first=2), digest(straight)]
    resumed = build_engine("llama", plan)
    assert resumed.load(folder) == 2
    return expected, [*train_steps(resumed, 3, first=2), digest(resumed)]


def digest(engine: Engine) -> str:
    """Of every byte of model and optimizer that this rank holds."""
    held = hashlib.sha256()
    for _, tensor in sorted(engine.state().items()):
        held.update(local(tensor).detach().contiguous().numpy().tobytes())
    return held.hexdigest()


PLANS: list[dict[str, Any]] = [
    {"mesh": {"dp_replicate": 4}},
    {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}},
    {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}},
]


@pytest.mark.parametrize("plan", by_default(PLANS[1:2], PLANS), ids=["DDP", "ZeRO-3", "HSDP ZeRO-1"])
def test_resuming_on_the_same_layout_gives_the_same_bits(plan: dict[str, Any], tmp_path: Path) -> None:
    for expected, found in run_ranks(resume, 4, plan, str(tmp_path), timeout_s=120.0):
        assert found == expected
