"""Masters among the offloaded states on several ranks: every bit of the same layout without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from narrow import Narrow
from offloaded import digests, offloaded, small_chunks, trained
from tiny import CPU, train_steps

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy

BF16 = {"precision": {"preset": "bf16"}}
SHARDED = {"mesh": {"dp_shard": 2}, **BF16}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "DDP": (2, "qwen3-tied", {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 4}, **BF16}, {}),
    "ZeRO-1": (2, "gpt2", {**SHARDED, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 4}}, {}),
    "ZeRO-2": (2, "qwen3-tied", {**SHARDED, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}, {}),
    "ZeRO-3, recomputed": (
        2,
        "qwen3-tied",
        {**SHARDED, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
        {"frozen": ("model.layers.0.*",)},
    ),
    "float16": (
        2,
        "qwen3-tied",
        {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "precision": {"preset": "fp16"}},
        {},
    ),
    "tensor parallel": (2, "llama", {"mesh": {"tp": 2}, **BF16}, {}),
    "experts": (2, "mixtral", {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}, **BF16}, {}),
    "DDP of four": (4, "qwen3-tied", {"mesh": {"dp_replicate": 4}, **BF16}, {}),
    "HSDP": (
        4,
        "qwen3-tied",
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 2},
            "data_parallel": {"zero": 2},
            "pipeline": {"microbatches": 2},
            **BF16,
        },
        {},
    ),
    "pipeline": (
        4,
        "qwen3-four",
        {"mesh": {"pp": 2, "dp_replicate": 2}, "pipeline": {"microbatches": 4, "schedule": "1f1b"}, **BF16},
        {},
    ),
    "pipeline of shards": (
        4,
        "qwen3-four",
        {
            "mesh": {"pp": 2, "dp_shard": 2},
            "data_parallel": {"zero": 1},
            "pipeline": {"microbatches": 4, "schedule": "1f1b"},
            **BF16,
        },
        {},
    ),
}


def both(rank: int, world: int, names: tuple[str, ...]) -> dict[str, bool]:
    """Whether losses, norms and all bytes of this rank are equal, by layout and place of the update."""
    found = {}
    for name in names:
        _, family, plan, options = LAYOUTS[name]
        expected = trained(family, plan, "", steps=3, **options)
        for update in ("device, masters", "host, masters"):
            found[f"{name}, {update}"] = trained(family, plan, update, steps=3, **options) == expected
    return found


DEFAULT = ("DDP", "ZeRO-1")
EXTENDED = ("HSDP", "pipeline of shards")


def _mark(name: str) -> pytest.MarkDecorator:
    return pytest.mark.extended if name in EXTENDED else pytest.mark.slow


@pytest.mark.parametrize(
    "names",
    [
        DEFAULT,
        *(pytest.param((name,), id=name, marks=_mark(name)) for name in LAYOUTS if name not in DEFAULT),
    ],
)
def test_every_bit_is_that_of_masters_on_the_device(names: tuple[str, ...]) -> None:
    world = LAYOUTS[names[0]][0]
    for found in run_ranks(both, world, names, timeout_s=240.0):
        assert [name for name, is_equal in found.items() if not is_equal] == []
        assert len(found) == 2 * len(names)


def uneven(world: int, update: str) -> Engine:
    torch.manual_seed(0)
    tables: dict[str, Any] = {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}} if world > 1 else {}
    with small_chunks():
        plan = Plan.from_tables(offloaded({**tables, **BF16}, update))
        return Engine(Narrow(), plan, optimizer=OptimizerPolicy(learning_rate=1e-3), device=CPU)


def save(rank: int, world: int, folder: str) -> bool:
    plain, engine = uneven(world, ""), uneven(world, "device, masters")
    is_same = train_steps(engine, 3) == train_steps(plain, 3) and digests(engine) == digests(plain)
    engine.save(Path(folder) / "offloaded")
    plain.save(Path(folder) / "plain")
    return is_same


def load(rank: int, world: int, folder: str) -> dict[str, bool]:
    plain, engine = uneven(world, ""), uneven(world, "host, masters")
    assert plain.load(Path(folder) / "offloaded") == engine.load(Path(folder) / "plain") == 3
    is_loaded = digests(plain) == digests(engine)
    is_same = train_steps(plain, 2, first=3) == train_steps(engine, 2, first=3)
    return {"loaded": is_loaded, "trained": is_same and digests(plain) == digests(engine)}


@pytest.mark.extended
def test_uneven_and_empty_shards_save_on_one_layout_and_load_on_others(tmp_path: Path) -> None:
    assert all(run_ranks(save, 4, str(tmp_path)))
    for world in (1, 2):
        for found in run_ranks(load, world, str(tmp_path)):
            assert [name for name, is_equal in found.items() if not is_equal] == []
