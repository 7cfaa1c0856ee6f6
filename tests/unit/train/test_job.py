"""A job travels to the ranks as JSON and comes back the same; a GPU computes in bf16 unless told otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.core.run_spec import RunSpec
from weft.train.job import Job, default_folder


def job(tables: dict[str, Any], **options: Any) -> Job:
    return Job.create(run=RunSpec.default(), plan_tables=tables, **options)


def test_json_there_and_back() -> None:
    sent = job({"mesh": {"dp_shard": 2}}, out="runs/x", resume=True, device="cpu")
    assert Job.from_json(sent.to_json()) == sent
    assert sent.out.is_absolute()


@pytest.mark.parametrize(
    ("tables", "on_gpu"),
    [
        ({}, "bf16"),
        ({"precision": {}}, "bf16"),
        ({"precision": {"preset": "fp32"}}, "fp32"),
        ({"precision": {"preset": "fp16"}}, "fp16"),
        ({"data_parallel": {"strategy": "dataparallel"}}, "fp32"),  # it runs in nothing else
    ],
)
def test_precision_left_open(tables: dict[str, Any], on_gpu: str) -> None:
    before = repr(tables)
    assert job(tables).plan(device_type="cuda").precision.preset == on_gpu
    expected = tables.get("precision", {}).get("preset", "fp32")
    assert job(tables).plan(device_type="cpu").precision.preset == expected
    assert repr(tables) == before


def test_the_default_folder_names_the_model() -> None:
    assert default_folder(RunSpec.default()).parent == Path("runs")
    assert default_folder(RunSpec.default()).name.startswith("llama-")
    run = RunSpec.from_tables({"model": {"path": "/models/tiny"}})
    assert default_folder(run).name.startswith("tiny-")
