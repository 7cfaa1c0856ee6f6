"""A resumed run has the bits of the uninterrupted one: shares of the last step and biases are in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gloo_ranks import run_ranks
from router_engines import BOUNDS, SPECS, build, check_same, over_ranks, runs, trained
from tiny import train_steps

from weft.core.run_spec import RouterSpec
from weft.engine.engine import Engine
from weft.engine.router import routers

ZERO_3 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
STAGES = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}


def values(engine: Engine) -> list[Any]:
    biases = {name: value.tolist() for name, value in engine.model.named_buffers() if name.endswith("correction_bias")}
    return [*train_steps(engine, 2, first=2), biases, engine.scalars()["router"]]


def resume(rank: int, world: int, tables: dict[str, Any], folder: str) -> tuple[list[Any], list[Any]]:
    straight = build("deepseek_v3", tables, SPECS["deepseek_v3"])
    train_steps(straight, 2)
    straight.save(folder)
    expected = values(straight)
    resumed = build("deepseek_v3", tables, SPECS["deepseek_v3"])
    resumed.load(folder)
    return expected, values(resumed)


@pytest.mark.parametrize("tables", [ZERO_3, STAGES], ids=["ZeRO-3", "pp"])
def test_resuming_gives_the_same_bits(tables: dict[str, Any], tmp_path: Path) -> None:
    for expected, found in run_ranks(resume, 2, tables, str(tmp_path), timeout_s=120.0):
        assert found == expected
        assert any(any(bias) for bias in found[2].values())
        assert found[3]


def hand_on(rank: int, world: int, folder: str, tables: dict[str, Any], is_first: bool) -> list[Any]:
    engine = build("deepseek_v3", tables, SPECS["deepseek_v3"])
    if is_first:
        train_steps(engine, 2)
        engine.save(folder)
    else:
        engine.load(folder)
    return values(engine)


def test_a_checkpoint_goes_to_another_layout(tmp_path: Path) -> None:
    expected = run_ranks(hand_on, 2, str(tmp_path), ZERO_3, True, timeout_s=120.0)[0]
    found = run_ranks(hand_on, 1, str(tmp_path), {}, False, timeout_s=120.0)[0]
    assert [loss for loss, _ in found[:2]] == pytest.approx([loss for loss, _ in expected[:2]], abs=1e-5)
    assert found[2:] == expected[2:]


def without_sum(rank: int, world: int) -> Any:
    with (
        mock.patch.object(routers, "sum_over", lambda value, group: value),
        build("qwen3_moe", {"mesh": {"dp_replicate": 2}}, SPECS["qwen3_moe"]) as engine,
    ):
        return {"DDP": trained(engine)}


def averaged(rank: int, world: int) -> Any:
    own = routers.Routers.begin_step

    def begin_step(self: routers.Routers, num_tokens: Any, **others: Any) -> None:
        own(self, num_tokens * world, **others)

    with (
        mock.patch.object(routers.Routers, "begin_step", begin_step),
        build("qwen3_moe", {"mesh": {"dp_replicate": 2}}, SPECS["qwen3_moe"]) as engine,
    ):
        return {"DDP": trained(engine)}


def test_planted_bugs_are_noticed() -> None:
    """Counts of one rank alone, and losses averaged over ranks instead of summed."""
    alone = run_ranks(runs, 1, "qwen3_moe", timeout_s=120.0)
    for bug in (without_sum, averaged):
        found = run_ranks(bug, 2)
        with pytest.raises(AssertionError):
            check_same(over_ranks(alone, "alone"), over_ranks(found, "DDP"), bug.__name__, bound=BOUNDS["qwen3_moe"])


def per_microbatch(rank: int, world: int, count: int) -> list[float]:
    spec = RouterSpec(balance_loss=0.3, balance_over="micro_batch")
    with build("qwen3_moe", {"pipeline": {"microbatches": count}}, spec) as engine:
        return [norm for _, norm in train_steps(engine, 1)]


def test_shares_of_a_micro_batch_depend_on_their_number() -> None:
    """It is why the default is the batch."""
    one, four = (run_ranks(per_microbatch, 1, count)[0] for count in (1, 4))
    assert abs(one[0] - four[0]) > 1e-4 * one[0]
