"""Texts that two ranks sample are those of one process, whatever the layout."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from tiny_run import Settings, train_here

SETTINGS: dict[str, Any] = {
    "train.steps": 12,
    "samples": {"every": 6, "prompts": ["warp and ", "the loom"], "max_new_tokens": 8},
    "ledger": {"measure": False, "dry_run": False},
    "logging.tensorboard": False,
}


def train_rank(rank: int, world: int, cache: str, out: str, corpus: str, settings: Settings, plan: Settings) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    train_here(Path(out), Path(corpus), settings, plan=plan)


@pytest.mark.parametrize(
    "plan",
    [
        # the vocabulary of 257 does not divide: the last rank's slice is padded
        {"mesh": {"tp": 2}, "kernels": {"loss": "fused"}},
        pytest.param({"mesh": {"tp": 2}}, marks=pytest.mark.extended),
        pytest.param({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}, marks=pytest.mark.extended),
        pytest.param({"mesh": {"dp_replicate": 2}, "compile": {"enabled": True}}, marks=pytest.mark.slow),
    ],
    ids=["tp fused", "tp", "zero3", "ddp compiled"],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_do_not_depend_on_the_layout(
    plan: Settings, temperature: float, tmp_path: Path, corpus: Path, cache: Path
) -> None:
    settings = {**SETTINGS, "samples": {**SETTINGS["samples"], "temperature": temperature}}
    train_here(tmp_path / "one", corpus, settings)
    run_ranks(train_rank, 2, str(cache), str(tmp_path / "two"), str(corpus), settings, plan)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "samples.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 4
    assert two == one
