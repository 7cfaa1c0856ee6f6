"""Bad steps on ranks: all drop the same update, also where only one rank or one stage saw the bad sample."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from gloo_ranks import run_ranks
from planted import bad_samples, samples_left_out, without_update_of
from tiny_run import Settings, curve, metrics, state_digest, train_here

SETTINGS = {
    "train.steps": 6,
    "evaluation.every": 0,
    "checkpoint": {"every": 2, "keep": 2},
    "logging.tensorboard": False,
    "ledger": {"measure": False, "dry_run": False},
}


def train_both(
    rank: int, world: int, cache: str, folder: str, corpus: str, plan: Settings, policy: str, is_skip: bool
) -> None:
    """A run with a bad sample in step 4, and one that was never given its update."""
    os.environ["XDG_CACHE_HOME"] = cache
    with bad_samples([3 * 8 + 1]):  # a row of the first data-parallel rank
        train_here(Path(folder) / "run", Path(corpus), {**SETTINGS, "train.on_bad_step": policy}, plan=plan)
    reference: AbstractContextManager[None] = without_update_of(4) if is_skip else samples_left_out(2 * 8, 2 * 8)
    with reference:
        train_here(Path(folder) / "reference", Path(corpus), SETTINGS, plan=plan)


def test_ranks_skip_together(tmp_path: Path, corpus: Path, cache: Path) -> None:
    plan = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
    run_ranks(train_both, 2, str(cache), str(tmp_path), str(corpus), plan, "skip", True)
    assert [line["step"] for line in metrics(tmp_path / "run") if line["skipped"]] == [4]
    assert curve(tmp_path / "run")[4:] == curve(tmp_path / "reference")[4:]
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "reference")


def test_a_pipeline_rewinds_together(tmp_path: Path, corpus: Path, cache: Path) -> None:
    plan = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
    run_ranks(train_both, 2, str(cache), str(tmp_path), str(corpus), plan, "rewind", False)
    assert curve(tmp_path / "run") == curve(tmp_path / "reference")
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "reference")
