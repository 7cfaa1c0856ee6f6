"""Copies of a parameter compute with equal bits; bugs that no loss shows are found, and blamed on copy and rank."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import copy_mutations as bugs
import pytest
from gloo_ranks import run_ranks
from mutation_groups import Bug, Group, require_caught
from tiny import build_engine, global_batch

from weft.verify.forward_weights import NAME, WeightWatch, check_forward_weights

IN_INT8 = {
    "mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2},
    "precision": {"preset": "bf16", "gather": "int8"},
}  # fmt: skip
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}
REPLICAS = {"mesh": {"dp_replicate": 2}, "precision": {"preset": "bf16"}, "activations": {"policy": "full"}}
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gathered": ("llama", IN_INT8, bugs.own_shard_not_rounded_in_a_gather),
    "tied": ("qwen3-tied", PIPELINE, bugs.tied_copy_updated_by_itself),
    "tied shards": ("gpt2", {"mesh": {"tp": 2}}, nullcontext),
    "replicas": ("llama", REPLICAS, bugs.one_replica_casts_up),
}


def watched(_rank: int, _world: int) -> dict[str, tuple[str, str]]:
    found = {}
    for name, (family, plan, bug) in CASES.items():
        details = []
        for mutation in (nullcontext, bug):
            with mutation(), build_engine(family, plan) as engine:
                watch = WeightWatch(engine)
                for step in range(2):
                    with watch.watching():
                        engine.step(engine.share_of(global_batch(step, rows=4)))
                check = check_forward_weights(watch.gather(), never_flushes=False, describe_rank=lambda rank: f"{rank}")
                details.append(f"{check.ok}: {check.detail}")
        found[name] = details[0], details[1]
    return found


def test_a_copy_with_other_bits_is_found() -> None:
    found = run_ranks(watched, 2, timeout_s=200.0)[0]
    assert all(healthy.startswith("True") for healthy, _ in found.values()), found
    assert found["tied shards"][1].startswith("True"), found
    assert found["gathered"][1].startswith("False: step 1, model.embed_tokens.weight, 1: expected the bits that 0")
    assert "step 2, lm_head.weight, 1: expected the bits of its tied copy model.embed_tokens.weight" in found["tied"][1]
    assert "step 1, model.layers.0.input_layernorm.weight, 1" in found["replicas"][1]


GROUPS = {
    "gathered": Group(plan=IN_INT8, bugs=(Bug(mutate=bugs.own_shard_not_rounded_in_a_gather, check=NAME, step=1),)),
    "tied": Group(
        plan=PIPELINE, model="qwen3-tied", bugs=(Bug(mutate=bugs.tied_copy_updated_by_itself, check=NAME, step=2),)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(GROUPS))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
