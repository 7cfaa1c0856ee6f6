"""Evaluation sets on two ranks have the losses of one process, also where their rows do not fill the ranks' batches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from tiny_run import Settings, checkpoint_steps, metrics, train_here

from weft.train.trained_tensors import best_step_of


def train_rank(rank: int, world: int, cache: str, out: str, corpus: str, settings: Settings, plan: Settings) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    train_here(Path(out), Path(corpus), settings, plan=plan)


@pytest.mark.parametrize(
    "plan",
    [
        {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
        pytest.param(
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}}, marks=pytest.mark.extended
        ),
    ],
    ids=["zero3", "pipeline"],
)
def test_sets_do_not_depend_on_the_layout(plan: Settings, tmp_path: Path, corpus: Path, cache: Path) -> None:
    (tmp_path / "own.txt").write_text("selvage and reed " * 9)  # 4 rows: the second rank has only filler
    sets = [{"name": "own", "source": str(tmp_path / "own.txt")}]
    settings = {"train.steps": 3, "evaluation.every": 1, "data.evaluation": sets, "logging.tensorboard": False}
    train_here(tmp_path / "one", corpus, settings)
    run_ranks(train_rank, 2, str(cache), str(tmp_path / "two"), str(corpus), settings, plan)
    one, two = ([line["evaluations"]["own"] for line in metrics(tmp_path / name)] for name in ("one", "two"))
    assert [found["tokens"] for found in two] == [found["tokens"] for found in one] == [128] * 3
    assert [found["loss"] for found in two] == pytest.approx([found["loss"] for found in one], rel=1e-5)


def test_ranks_keep_the_best_and_end_together(tmp_path: Path, corpus: Path, cache: Path) -> None:
    settings = {
        "train.steps": 20,
        "train.stop_after_evaluations": 2,
        "train.stop_delta": 100.0,  # nothing is an improvement after the first evaluation
        "evaluation": {"every": 2, "batches": 1},
        "checkpoint": {"every": 0, "keep": 1, "keep_best": "held-out"},
        "logging.tensorboard": False,
    }
    plan = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
    run_ranks(train_rank, 2, str(cache), str(tmp_path / "two"), str(corpus), settings, plan)
    lines = metrics(tmp_path / "two")
    assert len(lines) == 6
    found = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    best = min(found, key=lambda step: found[step])
    assert checkpoint_steps(tmp_path / "two") == sorted({best, 6})
    assert best_step_of(tmp_path / "two") == best
