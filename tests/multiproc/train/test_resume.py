"""Resume: bit by bit on the same layout, within rounding on another, data position included.

Three runs a case: straight through without a checkpoint; with one half-way; and the second one gone on with as a kill
after that checkpoint would have left it. All three must be the same run.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_ranks import run_ranks
from samples import by_default
from tiny_run import GPT2, Settings, checkpoint_steps, curve, metrics, rewind, state_digest, train_here
from tolerances import SAME_CURVE_LOSS_ABS, SAME_CURVE_NORM_REL

from weft.engine.precision import LossScale

HALF = 6
WIDE_GPT2 = {**GPT2, "config": {**GPT2["config"], "n_embd": 64}}
SAVES = {"checkpoint.every": HALF}
DDP_X2 = {"mesh": {"dp_replicate": 2}}
DDP_X4 = {"mesh": {"dp_replicate": 4}}
ZERO3_X2 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}

ONE_RANK_CASES: dict[str, tuple[Settings, Settings]] = {
    "adamw": ({}, {}),
    "adam, saved in the foreground": ({"train.optimizer": "adam", "checkpoint.asynchronous": False}, {}),
    "sgd with momentum": ({"train.optimizer": "sgd", "train.momentum": 0.9, "train.learning_rate": 0.3}, {}),
    # wide enough for rows of one 8-bit block
    "8-bit adamw": ({"train.optimizer": "adamw8bit", "model": WIDE_GPT2}, {}),
    "dropout": ({"model": GPT2}, {}),
    "bf16, ZeRO-3 on one rank": ({}, {"precision": {"preset": "bf16"}, "data_parallel": {"zero": 3}}),
    "frozen": ({"train.frozen": ["model.embed_tokens.*", "*.mlp.*"]}, {}),
    "micro-batches": ({}, {"pipeline": {"microbatches": 4}}),
}


def three_runs(folder: Path, corpus: Path, settings: Settings, plan: Settings) -> None:
    """straight, saved and resumed, under `folder`; on every rank of the group when there is one."""
    train_here(folder / "straight", corpus, settings, plan=plan)
    train_here(folder / "saved", corpus, {**settings, **SAVES}, plan=plan)
    if not dist.is_initialized() or dist.get_rank() == 0:
        rewind(folder / "saved", folder / "resumed", step=HALF)
    if dist.is_initialized():
        dist.barrier()
    train_here(folder / "resumed", corpus, {**settings, **SAVES}, plan=plan, resume=True)


def require_the_same_run(folder: Path) -> None:
    straight = curve(folder / "straight")
    assert [line["step"] for line in metrics(folder / "straight")] == list(range(1, 13))
    assert curve(folder / "saved") == straight
    assert curve(folder / "resumed") == straight
    final = state_digest(folder / "straight")
    assert state_digest(folder / "saved") == final
    assert state_digest(folder / "resumed") == final
    assert any(key.startswith("optim.") for key in final)
    assert checkpoint_steps(folder / "resumed") == [HALF, 12]


@pytest.mark.parametrize("case", by_default(["adamw", "dropout"], ONE_RANK_CASES))
def test_one_rank_goes_on_bit_by_bit(case: str, corpus: Path, cache: Path, tmp_path: Path) -> None:
    settings, plan = ONE_RANK_CASES[case]
    three_runs(tmp_path, corpus, settings, plan)
    require_the_same_run(tmp_path)


def test_the_loss_scale_goes_on_too(corpus: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So high that the first steps overflow, growing again after two good ones: value and count both matter.
    monkeypatch.setattr("weft.engine.engine.LossScale", partial(LossScale, initial=2.0**20, grow_after=2))
    three_runs(tmp_path, corpus, {}, {"precision": {"preset": "fp16"}})
    require_the_same_run(tmp_path)
    lines = metrics(tmp_path / "straight")
    assert {line["skipped"] for line in lines[:HALF]} == {True, False}, (
        "the checkpoint must lie amid good and bad steps"
    )
    assert len({line["loss_scale"] for line in lines[HALF:]}) > 1


def test_frozen_parameters_stay_and_are_saved(corpus: Path, cache: Path, tmp_path: Path) -> None:
    train_here(tmp_path / "run", corpus, {"train.frozen": ["*.embed_tokens.*"], "checkpoint.every": 6})
    first = state_digest(rewind(tmp_path / "run", tmp_path / "first", step=HALF))
    last = state_digest(tmp_path / "run")
    weights = {key for key in last if key.startswith("model.")}
    assert {key for key in weights if last[key] == first[key]} == {"model.model.embed_tokens.weight"}
    assert not [key for key in last if key.startswith("optim.") and "embed_tokens" in key]


def same_layout_ranks(rank: int, world: int, cache: str, folder: str, corpus: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    three_runs(Path(folder, "ddp"), Path(corpus), {}, DDP_X2)
    three_runs(Path(folder, "zero3"), Path(corpus), {}, ZERO3_X2)
    three_runs(Path(folder, "dropout"), Path(corpus), {"model": GPT2}, ZERO3_X2)


def resume_ranks(rank: int, world: int, cache: str, out: str, corpus: str, settings: Settings, plan: Settings) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    train_here(Path(out), Path(corpus), settings, plan=plan, resume=True)


@pytest.fixture(scope="module")
def two_rank_runs(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    run_ranks(same_layout_ranks, 2, str(cache), str(folder), str(corpus), timeout_s=120)
    return folder


@pytest.mark.parametrize("layout", ["ddp", "zero3", "dropout"])
def test_two_ranks_go_on_bit_by_bit(layout: str, two_rank_runs: Path) -> None:
    require_the_same_run(two_rank_runs / layout)


def test_a_chain_of_layouts_is_one_run(two_rank_runs: Path, corpus: Path, cache: Path, tmp_path: Path) -> None:
    train_here(tmp_path / "reference", corpus)
    expected = metrics(tmp_path / "reference")
    settings = {"checkpoint.every": 2}
    start = rewind(two_rank_runs / "ddp" / "saved", tmp_path / "four", step=HALF)

    run_ranks(resume_ranks, 4, str(cache), str(start), str(corpus), settings, DDP_X4, timeout_s=120)
    require_close(start, expected, resumed_from=HALF, num_ranks=4)
    shards = rewind(start, tmp_path / "shards", step=8)
    run_ranks(resume_ranks, 2, str(cache), str(shards), str(corpus), settings, ZERO3_X2, timeout_s=120)
    require_close(shards, expected, resumed_from=8, num_ranks=2)
    alone = rewind(shards, tmp_path / "alone", step=10)
    train_here(alone, corpus, settings, resume=True)
    require_close(alone, expected, resumed_from=10, num_ranks=1)


def require_close(run: Path, expected: list[dict[str, Any]], *, resumed_from: int, num_ranks: int) -> None:
    facts = json.loads((run / "ledger.json").read_text())["run"]
    assert (facts["resumed_from"], facts["num_ranks"], facts["steps"]) == (resumed_from, num_ranks, 12)
    found = metrics(run)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours["step"], ours["tokens"], ours["learning_rate"]) == (
            theirs["step"],
            theirs["tokens"],
            theirs["learning_rate"],
        )
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=0, abs=SAME_CURVE_LOSS_ABS)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=SAME_CURVE_NORM_REL)
