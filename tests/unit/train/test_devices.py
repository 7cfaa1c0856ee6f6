"""The devices of this host, and the recompute mixture that is chosen for them: once, before ranks start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import call_weft

from weft.cli.dryrun.question import DryRunQuestion
from weft.core.errors import DeviceError, MeshError, PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.resolve import resolve
from weft.train import devices
from weft.train.devices import choose_device_type, local_devices
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
    few, many = (job_of(OPEN, run_of(rows=rows)).plan for rows in (2, 16))
    assert few.activations.mixture == (0, 0)
    assert many.activations.mixture is not None
    assert 0 < sum(many.activations.mixture) <= 12


def test_dry_runs_choose_as_trainings_do() -> None:
    run = run_of(rows=16)
    assert DryRunQuestion.of(run, OPEN, "CPU").plan == job_of(OPEN, run).plan
    with pytest.raises(PlanError, match="no device is named") as caught:
        DryRunQuestion.of(run, OPEN, None)
    assert "--device" in caught.value.hint


def mixture_on_gpu(run: RunSpec) -> tuple[int, int]:
    tables = {**OPEN, "precision": {"preset": "bf16"}, "compile": {"enabled": False}}
    plan = resolve(tables, run, on_gpu=True, devices=lambda count: local_devices(count, device_type="cuda"))
    assert plan.activations.mixture is not None
    return plan.activations.mixture


def test_a_gpu_is_looked_up_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(rows=64)
    monkeypatch.setattr(devices, "_gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    roomy = mixture_on_gpu(run)
    monkeypatch.setattr(devices, "_gpu_name", lambda: "NVIDIA GeForce RTX 4090")
    small = mixture_on_gpu(run)
    assert (roomy[0], sum(roomy)) < (small[0], sum(small))
    monkeypatch.setattr(devices, "_gpu_name", lambda: "NVIDIA Unheard Of")
    with pytest.raises(PlanError, match="no entry for NVIDIA Unheard Of") as caught:
        mixture_on_gpu(run)
    assert "activations.mixture" in caught.value.hint


def test_a_gpu_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_PRINT_NAME", "raise SystemExit(1)")
    with pytest.raises(PlanError, match=r"get_device_name\(\) failed"):
        mixture_on_gpu(run_of())


@pytest.mark.parametrize(
    ("choice", "gpus", "ranks", "found"),
    [("cpu", 8, 2, "cpu"), ("auto", 0, 2, "cpu"), ("auto", 2, 2, "cuda"), ("cuda", 8, 2, "cuda")],
)
def test_the_device_type_follows_the_gpus(
    choice: Any, gpus: int, ranks: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: gpus)
    assert choose_device_type(choice, local_ranks=ranks) == found


@pytest.mark.parametrize(("choice", "gpus"), [("auto", 1), ("cuda", 1), ("cuda", 0)])
def test_too_few_gpus_are_an_error_before_ranks_start(choice: Any, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: gpus)
    with pytest.raises(DeviceError, match="GPU") as caught:
        Job.create(run=run_of(), plan_tables={"mesh": {"dp_replicate": 2}}, device=choice)
    assert "--device cpu" in caught.value.hint


def test_a_mesh_of_another_size_is_no_lack_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    with pytest.raises(MeshError, match=r"4 ranks .* but 2 were asked for"):
        Job.create(run=run_of(), plan_tables={"mesh": {"dp_replicate": 4}}, num_ranks=2)


def test_a_launcher_without_a_driver_imports_no_torch() -> None:
    code = (
        "import sys; from weft.train import devices; from weft.train.job import Job;"
        "from weft.core.run_spec import RunSpec; devices._has_driver = lambda: False;"
        "job = Job.create(run=RunSpec.default(), plan_tables={}, num_ranks=2);"
        "assert (job.device, job.plan.mesh.dp_replicate) == ('cpu', 2);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


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
