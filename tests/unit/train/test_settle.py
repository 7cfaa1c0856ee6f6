"""What a budget leaves open is chosen for the device that is here, once, and written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import call_weft

import weft.train.settle as settle
from weft.cli.dryrun.question import DryRunQuestion
from weft.core.errors import PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.job import Job

OPEN = {"activations": {"policy": "budget"}}


def run_of(*, rows: int = 8, length: int = 2048) -> RunSpec:
    return RunSpec.from_tables(
        {
            "model": {
                "type": "llama",
                "config": {
                    "hidden_size": 1024,
                    "intermediate_size": 4096,
                    "num_hidden_layers": 12,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 16,
                },
            },
            "data": {"sequence_length": length},
            "train": {"global_batch": rows},
        }
    )


def job_of(tables: dict[str, Any], run: RunSpec, **fields: Any) -> Job:
    return Job.create(run=run, plan_tables=tables, out="runs/none", device="cpu", **fields)


def test_a_job_has_its_blocks_before_ranks_start() -> None:
    few, many = (settle.resolve_job(job_of(OPEN, run_of(rows=rows))) for rows in (2, 16))
    assert few.plan_tables["activations"]["mixture"] == [0, 0]
    full, selective = many.plan_tables["activations"]["mixture"]
    assert 0 < full + selective <= 12
    assert Job.from_json(many.to_json()).plan(device_type="cpu").activations.mixture == (full, selective)
    assert settle.resolve_job(many) == many
    other = job_of({"activations": {"policy": "full"}}, run_of())
    assert settle.resolve_job(other) == other


def test_dry_runs_choose_as_trainings_do() -> None:
    run = run_of(rows=16)
    question = DryRunQuestion.of(run, OPEN, "CPU")
    assert question.plan == settle.resolve_mixture(run, Plan.from_tables(OPEN), on_gpu=False)
    with pytest.raises(PlanError, match="no device is named") as caught:
        DryRunQuestion.of(run, OPEN, None)
    assert "--device" in caught.value.hint


def test_a_gpu_is_looked_up_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plan = run_of(rows=64), Plan.from_tables({**OPEN, "precision": {"preset": "bf16"}})
    monkeypatch.setattr(settle, "_gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    roomy = settle.resolve_mixture(run, plan, on_gpu=True).activations.mixture
    monkeypatch.setattr(settle, "_gpu_name", lambda: "NVIDIA GeForce RTX 4090")
    small = settle.resolve_mixture(run, plan, on_gpu=True).activations.mixture
    assert roomy is not None
    assert small is not None
    assert (roomy[0], sum(roomy)) < (small[0], sum(small))
    monkeypatch.setattr(settle, "_gpu_name", lambda: "NVIDIA Unheard Of")
    with pytest.raises(PlanError, match="no entry for NVIDIA Unheard Of") as caught:
        settle.resolve_mixture(run, plan, on_gpu=True)
    assert "activations.mixture" in caught.value.hint


def test_a_gpu_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "_PRINT_NAME", "raise SystemExit(1)")
    with pytest.raises(PlanError, match=r"get_device_name\(\) failed"):
        settle.resolve_mixture(run_of(), Plan.from_tables(OPEN), on_gpu=True)


def test_the_run_folder_has_the_blocks(tmp_path: Path) -> None:
    tiny = ["hidden_size=16", "intermediate_size=32", "num_attention_heads=2", "num_key_value_heads=2"]
    settings = [f"model.config.{key}" for key in (*tiny, "num_hidden_layers=2")]
    settings += ["data.sequence_length=32", "train.global_batch=2", "train.steps=1", "activations.policy=budget"]
    settings += ["ledger.dry_run=false", "logging.tensorboard=false"]
    out = tmp_path / "run"
    options = [part for one in settings for part in ("--set", one)]
    code, _, err = call_weft("train", *options, "--out", str(out), "--device", "cpu")
    assert code == 0, err
    assert Plan.from_file(out / "plan.toml").activations.mixture == (0, 0)
    assert "recompute by budget: 0 blocks fully, 0 selectively, 2 not at all" in err
