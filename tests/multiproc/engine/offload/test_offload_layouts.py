"""Offloaded states on several ranks: every bit of the same layout without offload, on every kind of layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from narrow import Narrow
from offloaded import digests, offloaded, small_chunks, trained
from tiny import CPU, build_engine, train_steps

from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy

BF16 = {"precision": {"preset": "bf16"}}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "DDP": (2, "qwen3-tied", {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 4}}),
    "ZeRO-1": (2, "gpt2", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 4}}),
    "ZeRO-3": (2, "qwen3-tied", {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, **BF16}),
    "bfloat16 moments": (
        2,
        "qwen3-tied",
        {
            "mesh": {"dp_shard": 2},
            "data_parallel": {"zero": 2},
            "precision": {"preset": "bf16", "optimizer_state": "bfloat16"},
        },
    ),
    "tensor parallel": (2, "llama", {"mesh": {"tp": 2}, **BF16}),
    "experts": (2, "mixtral", {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}}),
    "HSDP": (4, "qwen3-tied", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 2}}),
    "pipeline": (
        4,
        "qwen3-four",
        {
            "mesh": {"pp": 2, "dp_shard": 2},
            "data_parallel": {"zero": 1},
            "pipeline": {"microbatches": 4, "schedule": "1f1b"},
        },
    ),
}


def both(rank: int, world: int, names: tuple[str, ...]) -> dict[str, bool]:
    """Whether losses, norms and all bytes of this rank are equal, by layout and place of the update."""
    found = {}
    for name in names:
        _, family, plan = LAYOUTS[name]
        expected = trained(family, plan, "", steps=3)
        for update in ("device", "host"):
            found[f"{name}, {update}"] = trained(family, plan, update, steps=3) == expected
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_every_bit_is_that_of_the_layout_without_offload(world: int) -> None:
    names = tuple(name for name, (ranks, _, _) in LAYOUTS.items() if ranks == world)
    for found in run_ranks(both, world, names, timeout_s=240.0):
        assert [name for name, is_equal in found.items() if not is_equal] == []
        assert len(found) == 2 * len(names)


def uneven(world: int, update: str) -> Engine:
    torch.manual_seed(0)
    tables: dict[str, Any] = {}
    if world > 1:
        tables = {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}}
    with small_chunks():
        plan = Plan.from_tables(offloaded(tables, update))
        return Engine(Narrow(), plan, optimizer=OptimizerPolicy(learning_rate=1e-3), device=CPU)


def save(rank: int, world: int, folder: str) -> bool:
    plain, engine = uneven(world, ""), uneven(world, "device")
    is_same = train_steps(engine, 3) == train_steps(plain, 3) and digests(engine) == digests(plain)
    engine.save(Path(folder) / "offloaded")
    plain.save(Path(folder) / "plain")
    return is_same


def load(rank: int, world: int, folder: str) -> dict[str, bool]:
    found = {}
    for update in ("host", "device"):
        plain, engine = uneven(world, ""), uneven(world, update)
        assert plain.load(Path(folder) / "offloaded") == engine.load(Path(folder) / "plain") == 3
        found[f"{update}, loaded"] = digests(plain) == digests(engine)
        is_same = train_steps(plain, 2, first=3) == train_steps(engine, 2, first=3)
        found[f"{update}, trained"] = is_same and digests(plain) == digests(engine)
    return found


def test_uneven_and_empty_shards_save_on_one_layout_and_load_on_others(tmp_path: Path) -> None:
    assert all(run_ranks(save, 4, str(tmp_path)))
    for world in (1, 2):
        for found in run_ranks(load, world, str(tmp_path)):
            assert [name for name, is_equal in found.items() if not is_equal] == []


WIDE = ModelSpec(
    type="llama",
    config={
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
)  # fmt: skip


def eight_bit(rank: int, world: int, folder: str) -> dict[str, bool]:
    policy, found = OptimizerPolicy(kind="adamw8bit"), {}
    plan: dict[str, Any] = {"mesh": {"dp_shard": world}, "data_parallel": {"zero": 3}, **BF16}
    expected = trained(WIDE, plan, "", steps=3, optimizer=policy)
    for update in ("device", "host"):
        found[update] = trained(WIDE, plan, update, steps=3, optimizer=policy) == expected
    plain, engine = (build_engine(WIDE, offloaded(plan, update), optimizer=policy) for update in ("", "device"))
    train_steps(engine, 2)
    engine.save(Path(folder))
    plain.load(Path(folder))
    found["loaded"] = digests(plain) == digests(engine)
    return found


@pytest.mark.extended
def test_8_bit_moments_have_the_bits_of_the_layout_without_offload(tmp_path: Path) -> None:
    for found in run_ranks(eight_bit, 2, str(tmp_path)):
        assert found == {"device": True, "host": True, "loaded": True}
