"""Error feedback in the engine: a resumed run has the bits of the uninterrupted one, on its own layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny import build_engine, train_steps

from weft.checkpoint.parts import ShardTensor
from weft.engine.engine import Engine
from weft.engine.ownership import local
from weft.engine.state import ERRORS

IN_INT8 = {"preset": "bf16", "reduce": "int8"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "DDP": {"mesh": {"dp_replicate": 2}, "data_parallel": {"bucket_bytes": 2**14}, "precision": {"reduce": "int8"}},
    "ZeRO-1": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "precision": IN_INT8},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "precision": IN_INT8},
    "HSDP": {"mesh": {"dp_shard": 2, "dp_replicate": 2}, "data_parallel": {"zero": 2}, "precision": IN_INT8},
    "ep": {"mesh": {"dp_shard": 4, "ep": 2}, "data_parallel": {"zero": 3}, "precision": IN_INT8},
}


def with_feedback(layout: str, *, is_on: bool = True) -> dict[str, Any]:
    plan = {"pipeline": {"microbatches": 2}, **LAYOUTS[layout]}
    return {**plan, "data_parallel": {**plan.get("data_parallel", {}), "error_feedback": is_on}}


def digest(engine: Engine) -> str:
    held = hashlib.sha256()
    for _, tensor in sorted(engine.state().items()):
        own = tensor.local if isinstance(tensor, ShardTensor) else local(tensor)
        held.update(own.detach().contiguous().numpy().tobytes())
    return held.hexdigest()


def resumed(rank: int, world: int, layouts: list[str], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in layouts:
        family = "mixtral" if name == "ep" else "llama"
        straight = build_engine(family, with_feedback(name))
        train_steps(straight, 2)
        straight.save(f"{folder}/{name}")
        expected = [*train_steps(straight, 2, first=2), digest(straight)]
        again = build_engine(family, with_feedback(name))
        again.load(f"{folder}/{name}")
        lost = [float(one.norm()) for one in again.strategy.errors.values()]
        kept = {key for key in again.state() if key.startswith(ERRORS)}
        same = [*train_steps(again, 2, first=2), digest(again)]
        off = build_engine(family, with_feedback(name, is_on=False))
        off.load(f"{folder}/{name}")
        found[name] = {
            "expected": expected, "same": same, "lost": lost, "keys": kept,
            "notes": (again.notes, off.notes),
        }  # fmt: skip
        for engine in (straight, again, off):
            engine.close()
    return found


def require_same_bits(world: int, layouts: list[str], folder: Path) -> None:
    ranks = run_ranks(resumed, world, layouts, str(folder), timeout_s=240.0)
    for name in layouts:
        for one in (rank[name] for rank in ranks):
            assert one["same"] == one["expected"], name
            assert all(lost > 0 for lost in one["lost"]), name
            assert len(one["keys"]) == len(one["lost"]) > 1, name
            assert not any("errors of gradients" in note for note in one["notes"][0]), name
            assert any("are not in this plan" in note for note in one["notes"][1]), name
        assert not ranks[0][name]["keys"] & ranks[1][name]["keys"], "each rank has its own"


def test_resuming_gives_the_same_bits(tmp_path: Path) -> None:
    require_same_bits(2, ["DDP", "ZeRO-3"], tmp_path)


@pytest.mark.extended
def test_resuming_gives_the_same_bits_with_accumulated_gradients(tmp_path: Path) -> None:
    require_same_bits(2, ["ZeRO-1"], tmp_path)


@pytest.mark.slow
def test_resuming_gives_the_same_bits_on_four_ranks(tmp_path: Path) -> None:
    require_same_bits(4, ["HSDP", "ep"], tmp_path)


def another_layout(rank: int, world: int, folder: str) -> tuple[str, ...]:
    first = build_engine("llama", with_feedback("DDP"))
    train_steps(first, 1)
    first.save(folder)
    other = build_engine("llama", with_feedback("ZeRO-3"))
    train_steps(other, 1)
    other.load(folder)
    assert not any(bool(errors.any()) for errors in other.strategy.errors.values())
    return other.notes


def test_another_layout_starts_without_errors_and_says_so(tmp_path: Path) -> None:
    for notes in run_ranks(another_layout, 2, str(tmp_path)):
        assert any("of another layout: they start at zero" in note for note in notes)
