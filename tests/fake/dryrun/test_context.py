"""Dry runs of context parallelism on a GPU: no mask of own by whole positions, and the planner's peak."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

LENGTH, WIDTH = 16384, 512


PAIRS = {"mesh": {"cp": 8}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}}


def run_of(*, kv_heads: int, mlp: int) -> RunSpec:
    config = {
        "hidden_size": WIDTH, "intermediate_size": mlp, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": kv_heads, "vocab_size": 257, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": config},
            "data": {"sequence_length": LENGTH},
            "train": {"global_batch": 1},
        }
    )


@pytest.mark.parametrize("mlp", [512, 2048])
@pytest.mark.parametrize("kv_heads", [pytest.param(8, marks=pytest.mark.extended), 2])
@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"cp": 4}, "data_parallel": {"zero": 0}},
        {"mesh": {"cp": 8}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
    ],
)
def test_gathered_keys_take_what_the_planner_says(tables: dict[str, Any], kv_heads: int, mlp: int) -> None:
    """A mask of a rank's positions by all of them would add half as much again."""
    run = run_of(kv_heads=kv_heads, mlp=mlp)
    plan = Plan.from_tables({**tables, "precision": {"preset": "bf16"}, "context_parallel": {"attention": "gather"}})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, f"{plan.num_ranks}xH200")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert 0.93 <= found.peak_bytes / inside <= 1.05


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("attention", ["gather", "ring"])
def test_groups_that_exchange_heads_take_what_the_planner_says(attention: str, size: int) -> None:
    run = run_of(kv_heads=2, mlp=512)
    policy = {"attention": attention, "ulysses": size}
    plan = Plan.from_tables({**PAIRS, "precision": {"preset": "bf16"}, "context_parallel": policy})
    found, predicted = dry_run(run, plan), estimate_plan(run, plan, f"{plan.num_ranks}xH200")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert 0.93 <= found.peak_bytes / inside <= 1.05
