"""An axis that only replicates is registered in one file and then plans, dry-runs, trains and verifies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from samples import by_default
from tiny_run import train_here, write_run

from weft.launch.local import launch

WEFT = Path(__file__).with_name("toy_weft.py")
SHORT = {
    "train.steps": 3,
    "train.global_batch": 8,
    "evaluation.every": 0,
    "checkpoint.at_end": True,
    "logging.tensorboard": False,
    "ledger.dry_run": False,
}
BESIDE: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    "DDP": {"mesh": {"dp_replicate": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4}},
}


def files(folder: Path, corpus: Path, beside: str) -> tuple[str, str]:
    """run.toml, and plan.toml with two copies of every rank of a layout."""
    tables = {**BESIDE[beside], "mesh": {**BESIDE[beside]["mesh"], "toy": 2}}
    plan = folder / "plan.toml"
    plan.write_text(tomli_w.dumps(tables), encoding="utf-8")
    return str(write_run(folder / "run.toml", corpus, SHORT)), str(plan)


def answer_of(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(WEFT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.extended
def test_it_plans_and_dry_runs(corpus: Path, tmp_path: Path) -> None:
    run, plan = files(tmp_path, corpus, "ZeRO-3")
    plain = tmp_path / "plain.toml"
    plain.write_text(tomli_w.dumps(BESIDE["ZeRO-3"]), encoding="utf-8")
    four, two = (
        answer_of("plan", run, "--plan", one, "--devices", devices, "--json")["plans"][0]
        for one, devices in ((plan, "4xCPU"), (str(plain), "2xCPU"))
    )
    assert four["plan"]["mesh"]["toy"] == 2
    assert four["memory"]["terms"] == two["memory"]["terms"]  # a copy holds what the original holds
    found, alone = (answer_of("dryrun", run, "--plan", one, "--device", "CPU", "--json") for one in (plan, str(plain)))
    assert found["memory"]["terms"] == alone["memory"]["terms"]
    assert found["traffic"] == alone["traffic"]


@pytest.mark.parametrize("beside", by_default([], BESIDE, extended=["ZeRO-3"]))
def test_it_trains_and_verifies(beside: str, corpus: Path, tmp_path: Path) -> None:
    run, plan = files(tmp_path, corpus, beside)
    command = [sys.executable, str(WEFT)]
    out = tmp_path / "out"
    trained = [*command, "train", run, "--plan", plan, "--out", str(out), "--device", "cpu"]
    launch(trained, num_ranks=4, scratch=tmp_path / "train")
    train_here(tmp_path / "alone", corpus, {**SHORT, "train.steps": 3})
    losses, alone = (
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (out, tmp_path / "alone")
    )
    assert losses == pytest.approx(alone, rel=1e-5)
    answer = tmp_path / "verdict.json"
    launch([*command, "verified", run, plan, str(answer)], num_ranks=4, scratch=tmp_path / "verify")
    verdict = json.loads(answer.read_text(encoding="utf-8"))
    assert verdict["ok"], verdict
    assert "toy 2" in verdict["plan"]
