"""A job travels to the ranks as JSON and comes back the same, its plan resolved."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import BatchError, ModelError
from weft.core.run_spec import RunSpec
from weft.train import devices
from weft.train.job import Job, default_folder, imports_of


def job(tables: dict[str, Any], **options: Any) -> Job:
    return Job.create(run=RunSpec.default(), plan_tables=tables, **options)


def test_json_there_and_back() -> None:
    sent = job({"mesh": {"dp_shard": 2}}, out="runs/x", resume=True, device="cpu")
    assert Job.from_json(sent.to_json()) == sent
    assert sent.out.is_absolute()


def test_the_plan_travels_as_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    sent = job({"mesh": {"dp_shard": 2}})
    assert (sent.device, sent.plan.precision.preset, sent.plan.compile.enabled) == ("cuda", "bf16", True)
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)  # a rank reads it and chooses nothing again
    assert Job.from_json(sent.to_json()).plan == sent.plan


def test_a_capacity_of_the_plan_is_recorded_in_the_run() -> None:
    """A resume with another plan drops the same choices."""
    plan = {"expert_parallel": {"capacity_factor": 1.25}}
    run = RunSpec.from_tables({"model": {"type": "mixtral", "config": {"num_hidden_layers": 2}}})
    assert Job.create(run=run, plan_tables=plan, device="cpu").run.router.capacity_factor == 1.25
    with pytest.raises(ModelError, match="capacity_factor does not apply to llama") as caught:
        job(plan, device="cpu")
    assert caught.value.hint == "leave expert_parallel.capacity_factor out of the plan"


def test_the_default_folder_names_the_model() -> None:
    assert default_folder(RunSpec.default()).parent == Path("runs")
    assert default_folder(RunSpec.default()).name.startswith("llama-")
    run = RunSpec.from_tables({"model": {"path": "/models/tiny"}})
    assert default_folder(run).name.startswith("tiny-")


def test_a_refused_plan_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunSpec] = []
    monkeypatch.setattr("weft.train.job.with_model_files", asked.append)
    with pytest.raises(BatchError):
        job({"pipeline": {"microbatches": 7}}, device="cpu")
    assert not asked


def test_imports_name_the_code_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt-neox"}')
    for model in ({"type": "gpt-neox"}, {"path": str(tmp_path)}):
        run = RunSpec.from_tables({"model": model})
        assert imports_of(run) == ["weft.train.worker", "transformers.models.gpt_neox.modeling_gpt_neox"]
    assert find_spec("transformers.models.gpt_neox.modeling_gpt_neox") is not None
    assert imports_of(RunSpec.from_tables({"model": {"path": str(tmp_path / "none")}})) == ["weft.train.worker"]
