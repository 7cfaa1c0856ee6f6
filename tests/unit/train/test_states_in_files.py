"""A training with states in files: what a resume continues from, and the checkpoint at its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import destroy_process_group, is_initialized

from weft.checkpoint.layout import list_steps
from weft.core.run_spec import RunSpec
from weft.train.job import Job
from weft.train.worker import run_job

ROOT = Path(__file__).parents[3]
RUN: dict[str, Any] = {
    "model": {
        "type": "qwen3",
        "config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8,
        },
    },
    "data": {"tokenizer": "bytes", "sequence_length": 32},
    "train": {"global_batch": 4},
    "evaluation": {"every": 0},
    "logging": {"tensorboard": False},
    "ledger": {"dry_run": False, "measure": False},
}  # fmt: skip
IN_FILES = {"offload": {"optimizer": "nvme", "durable": "step"}}


def train(out: Path, plan: dict[str, Any], *, steps: int, resume: bool = False, **checkpoint: Any) -> dict[str, Any]:
    run = {**RUN, "train": {**RUN["train"], "steps": steps}, "checkpoint": checkpoint}
    job = Job.create(run=RunSpec.from_tables(run), plan_tables=plan, out=out, device="cpu", quiet=True, resume=resume)
    try:
        return run_job(job)
    finally:
        if is_initialized():
            destroy_process_group()


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.extended
def test_a_resume_continues_from_files_that_are_newer_than_the_checkpoint(tmp_path: Path) -> None:
    plain, out = tmp_path / "plain", tmp_path / "filed"
    train(plain, {}, steps=5)  # a learning rate depends on the number of steps
    train(plain, {}, steps=6, resume=True)
    train(out, IN_FILES, steps=5, every=2, at_end=False)
    assert list_steps(out / "checkpoints") == [4, 2]
    ledger = train(out, IN_FILES, steps=6, resume=True)
    assert ledger["run"]["resumed_from"] == 5
    assert losses(out) == losses(plain)
    assert list_steps(out / "checkpoints")[0] == 6


@pytest.mark.extended
def test_a_run_that_ended_before_its_checkpoint_is_saved_by_a_resume(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out, IN_FILES, steps=3, at_end=False)
    assert list_steps(out / "checkpoints") == []
    train(out, IN_FILES, steps=3, resume=True)
    assert list_steps(out / "checkpoints") == [3]


@pytest.mark.slow
def test_no_committed_step_is_lost_by_kills(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "offload_crashes.py"), "--kills", "8", "--steps", "20"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "with other losses or bytes: 0." in done.stdout
