"""Delayed updates of offloaded states: verify holds them against one process, and catches bugs of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves a test's own folder out

import delayed_mutations as bugs
from mutation_groups import Bug, Group, require_caught
from verify_ranks import Tables, small_run, verdicts_of_many_in_rank

STEPS = 5


def late(update: str, **plan: Any) -> Tables:
    return {**plan, "offload": {"optimizer": "cpu", "update": update, "delayed": True}}


# ranks, model, keys of the run, plan
PLANS: dict[str, tuple[int, str, Tables, Tables]] = {
    "one rank": (1, "qwen3-tied", {}, late("host", pipeline={"microbatches": 2})),
    "one rank, unclipped sgd": (1, "llama", {"optimizer": "sgd", "clip_norm": 0.0}, late("device")),
    "DDP": (2, "llama", {}, late("host", mesh={"dp_replicate": 2}, pipeline={"microbatches": 2})),
    "DDP, device": (2, "llama", {}, late("device", mesh={"dp_replicate": 2})),
    "ZeRO-2": (
        2, "llama", {},
        late("device", mesh={"dp_shard": 2}, data_parallel={"zero": 2}, pipeline={"microbatches": 2}),
    ),
    "ZeRO-3, bf16": (
        2, "qwen3-tied", {},
        late("host", mesh={"dp_shard": 2}, data_parallel={"zero": 3}, precision={"preset": "bf16"}),
    ),
    "tensor parallel": (2, "llama", {}, late("device", mesh={"tp": 2})),
    "pipeline": (2, "qwen3-tied", {}, late("host", mesh={"pp": 2}, pipeline={"microbatches": 2})),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default([], PLANS, extended=["ZeRO-2"]))
def test_every_check_passes(name: str, corpus: Path, tmp_path: Path) -> None:
    ranks, model, train, plan = PLANS[name]
    cases = {name: (small_run(str(corpus), model=model, train=train), plan)}
    found = run_ranks(verdicts_of_many_in_rank, ranks, cases, str(tmp_path), STEPS, timeout_s=600.0)[0]
    assert found[name]["ok"], found[name]["checks"]


GROUPS: dict[str, Group] = {
    "device": Group(
        plan=late("device", mesh={"dp_shard": 2}, data_parallel={"zero": 3}, pipeline={"microbatches": 2}),
        bugs=(
            Bug(mutate=bugs.update_lands_twice, check="first update", step=1),
            Bug(mutate=bugs.second_update_dropped, check="loss", step=4),
            Bug(mutate=bugs.update_lands_at_once, check="first update", step=1),
            Bug(mutate=bugs.update_starts_from_the_weights_before, check="loss", step=4),
            Bug(mutate=bugs.checkpoint_without_the_update_in_flight, check="weights"),
            Bug(mutate=bugs.norm_of_the_step_before, check="loss", step=4),
        ),
    ),
    "host": Group(
        plan=late("host", pipeline={"microbatches": 2}),
        num_ranks=1,
        bugs=(
            Bug(mutate=bugs.update_lands_twice, check="first update", step=1),
            Bug(mutate=bugs.second_update_dropped, check="loss", step=4),
            Bug(mutate=bugs.rate_of_the_step_before_on_the_host, check="loss", step=4),
            Bug(mutate=bugs.rate_of_the_step_after_on_the_host, check="first update", step=1),
            Bug(mutate=bugs.norm_of_the_step_before, check="loss", step=4),
        ),
    ),
}


@pytest.mark.parametrize("name", by_default([], GROUPS))
def test_every_bug_is_caught_by_the_right_check(name: str, corpus: Path, tmp_path: Path) -> None:
    require_caught(GROUPS[name], corpus, tmp_path)
