"""`weft train` on two ranks as a user runs it: kill -9, restarts, signals to the launcher, torchrun."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from tiny_run import (
    PATIENCE_S,
    Settings,
    checkpoint_steps,
    curve,
    last_step,
    metrics,
    running_weft,
    state_digest,
    stop_after,
    train_here,
    write_run,
)
from waiting import wait_for

DDP_X2 = {"mesh": {"dp_replicate": 2}}
ZERO3_X2 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
LONG = {"train.steps": 80, "checkpoint.every": 4, "checkpoint.keep": 3, "evaluation.every": 0}
ENDLESS = {"train.steps": 20_000, "evaluation.every": 0}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


def straight_ranks(
    rank: int, world: int, cache: str, out: str, corpus: str, settings: Settings, plan: Settings, last: int
) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    with stop_after(last):
        train_here(Path(out), Path(corpus), settings, plan=plan)


def rank_pids(folder: Path, *, generation: int = 0) -> list[int]:
    """The pids that the ranks of a launcher wrote down; empty before all of them have."""
    files = sorted((folder / "tmp").glob(f"weft-*/generation-{generation}/pid-*"))
    texts = [file.read_text() for file in files]
    return [int(text) for text in texts] if len(texts) == 2 and all(texts) else []


def kill_rank(process: subprocess.Popen[str], folder: Path, *, at_step: int, rank: int = 1, generation: int = 0) -> int:
    """kill -9 of a rank once the run has passed `at_step`; returns the newest checkpoint that was committed then."""
    wait_for(lambda: process.poll() is not None or bool(rank_pids(folder, generation=generation)))
    wait_for(lambda: process.poll() is not None or last_step(folder / "run") >= at_step)
    assert process.poll() is None, process.communicate()
    committed = checkpoint_steps(folder / "run")[-1]
    os.kill(rank_pids(folder, generation=generation)[rank], signal.SIGKILL)
    return committed


@pytest.fixture(scope="module")
def straight(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LONG without interruption."""
    out = tmp_path_factory.mktemp("straight") / "run"
    run_ranks(straight_ranks, 2, str(cache), str(out), str(corpus), LONG, ZERO3_X2, 80, timeout_s=120)
    return out


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_nothing_committed_is_lost(
    straight: Path, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run.toml", corpus, LONG)
    run = tmp_path / "run"
    zero = ("--set", "data_parallel.zero=3")
    with running_weft("train", "run.toml", "--nproc", "2", *zero, "--out", "run", cwd=tmp_path, cache=cache) as process:
        committed = kill_rank(process, tmp_path, at_step=10)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, err
    assert err.count("error [") == 1
    assert "error [W701]: rank 1 (pid " in err
    assert "was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert out == ""
    assert checkpoint_steps(run)[-1] >= committed
    assert not (run / "ledger.json").exists()

    # Killed again while it goes on, it recovers by itself.
    arguments = ("train", "--resume", "run", "--max-restarts", "1", "--json")
    with running_weft(*arguments, cwd=tmp_path, cache=cache) as process:
        kill_rank(process, tmp_path, at_step=committed + 20, rank=0)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "restarting all ranks (1 of 1)" in err
    facts = json.loads(out)["run"]
    assert (facts["status"], facts["steps"], facts["num_ranks"]) == ("finished", 80, 2)
    assert facts["resumed_from"] >= committed
    assert curve(run) == curve(straight)
    assert state_digest(run) == state_digest(straight)


@pytest.mark.slow
def test_sigterm_to_the_launcher_saves_and_ends_with_zero(corpus: Path, cache: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "run.toml", corpus, ENDLESS)
    run = tmp_path / "run"
    with running_weft("train", "run.toml", "--nproc", "2", "--out", "run", cwd=tmp_path, cache=cache) as process:
        wait_for(lambda: process.poll() is not None or last_step(run) >= 3)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    stopped = last_step(run)
    facts = json.loads((run / "ledger.json").read_text())["run"]
    assert (facts["status"], facts["steps"], facts["strategy"]) == ("stopped", stopped, "DDP")
    assert checkpoint_steps(run) == [stopped]
    run_ranks(resume_both, 2, str(cache), str(tmp_path), str(corpus), stopped + 3, timeout_s=120)
    assert curve(run) == curve(tmp_path / "straight")
    assert state_digest(run) == state_digest(tmp_path / "straight")


def resume_both(rank: int, world: int, cache: str, folder: str, corpus: str, last: int) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    with stop_after(last):
        train_here(Path(folder, "run"), Path(corpus), ENDLESS, plan=DDP_X2, resume=True)
    with stop_after(last):
        train_here(Path(folder, "straight"), Path(corpus), ENDLESS, plan=DDP_X2)


@pytest.mark.slow
def test_under_torchrun_the_ranks_agree_on_one_folder_of_their_own_choice(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run.toml", corpus, {"train.steps": 3})
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("train", "run.toml", "--set", "data_parallel.zero=2", "--json")
    with running_weft(*arguments, cwd=tmp_path, cache=cache, launcher=launcher) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    [run] = (tmp_path / "runs").iterdir()
    printed = json.loads(out)
    assert printed["run_dir"] == str(run)
    assert (printed["run"]["strategy"], printed["run"]["num_ranks"]) == ("ZeRO-2", 2)
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert checkpoint_steps(run) == [3]


@pytest.mark.slow
def test_ten_kills_lose_nothing(corpus: Path, cache: Path, tmp_path: Path) -> None:
    """kill -9 of a random rank at a random moment, ten times over one run, by turns with --resume and restarts."""
    draw = random.Random(0)
    settings = {**LONG, "train.steps": 400}
    write_run(tmp_path / "run.toml", corpus, settings)
    run, committed = tmp_path / "run", 0
    first = ("train", "run.toml", "--nproc", "2", "--set", "data_parallel.zero=3", "--out", "run")
    for kill in range(10):
        arguments = first if kill == 0 else ("train", "--resume", "run")
        with running_weft(*arguments, cwd=tmp_path, cache=cache) as process:
            time.sleep(draw.random())
            committed = kill_rank(process, tmp_path, at_step=committed + draw.randint(6, 40), rank=draw.randint(0, 1))
            _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 3, err
        assert checkpoint_steps(run)[-1] >= committed
    with running_weft("train", "--resume", "run", cwd=tmp_path, cache=cache) as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    whole = tmp_path / "whole"
    run_ranks(straight_ranks, 2, str(cache), str(whole), str(corpus), settings, ZERO3_X2, 400, timeout_s=240)
    assert curve(run) == curve(whole)
    assert state_digest(run) == state_digest(whole)
