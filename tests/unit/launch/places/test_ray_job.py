"""The driver script for Ray: its text, the value inside it, and the programs that it is handed to."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from weft.core.errors import RankError
from weft.launch.places.ray_job import RayJob, build_job, submit_ray, write_ray
from weft.launch.places.ray_nodes import _last_error
from weft.launch.places.request import LaunchRequest
from weft.launch.places.settings import LaunchSettings

GOLDEN = Path(__file__).with_name("golden") / "ray.py.txt"
SITE = {
    "job": {"environment": {"NCCL_DEBUG": "WARN"}},
    "ray": {"address": "auto", "strategy": "PACK", "cpus_per_rank": 4, "resources": {"rack-1": 1}},
}


@pytest.fixture
def request_(tmp_path: Path) -> LaunchRequest:
    (tmp_path / "run.toml").write_text('[model]\ntype = "llama"\n', encoding="utf-8")
    return LaunchRequest(
        verb=("train",),
        arguments=("run.toml", "--set", "train.seed=1"),
        name="big-run",
        nodes=2,
        ranks_per_node=8,
        on_gpus=True,
        folder=Path("/shared/project"),
        settings=LaunchSettings.from_tables(SITE),
        documents={"run.toml": tmp_path / "run.toml"},
    )


def test_the_script_is_the_golden_one(request_: LaunchRequest) -> None:
    (file,) = write_ray(request_)
    assert file.name == "big_run_on_ray.py"
    assert file.text == GOLDEN.read_text(encoding="utf-8")


def test_the_script_has_the_whole_job(request_: LaunchRequest, tmp_path: Path) -> None:
    (file,) = write_ray(request_)
    (tmp_path / file.name).write_text(file.text, encoding="utf-8")
    job = runpy.run_path(str(tmp_path / file.name))["job"]
    assert isinstance(job, RayJob)
    assert job == build_job(request_)
    assert job.words[-3:] == ("--out", "/shared/project/runs/big-run", "--continue")
    assert (job.gpus_per_node, job.cpus_per_node) == (8, 32)


def test_a_job_server_gets_the_script_which_then_is_inside_the_cluster(
    request_: LaunchRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = LaunchSettings.from_tables({"ray": {"address": "http://head:8265"}})
    request = replace(request_, settings=site)
    programs = tmp_path / "programs"
    programs.mkdir()
    body = f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words; cp "$9"/* {tmp_path}/got\n'
    (programs / "ray").write_text(body, encoding="utf-8")
    (programs / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    files = write_ray(request)
    name = submit_ray(request, files)
    words = (tmp_path / "words").read_text(encoding="utf-8").splitlines()
    assert words[:8] == [
        "job",
        "submit",
        "--address",
        "http://head:8265",
        "--no-wait",
        "--submission-id",
        name,
        words[7],
    ]
    assert words[-3:] == ["--", "python", "big_run_on_ray.py"]
    assert (tmp_path / "got").read_text(encoding="utf-8") == files[0].text
    assert "address='auto'" in files[0].text


def test_servers_are_actors_of_their_own(request_: LaunchRequest) -> None:
    request = replace(request_, verb=("server", "train"), arguments=("run.toml",), nodes=1)
    (file,) = write_ray(request)
    assert file.text == "weft server train run.toml --launcher ray --address auto\n"


def test_the_error_of_a_rank_is_found_in_its_output() -> None:
    text = "step 1\nerror [W702]: the loss is not finite\nhint: lower the learning rate\nTerminated\n"
    error = _last_error(text)
    assert error is not None
    assert (error.code, error.message, error.hint) == ("W702", "the loss is not finite", "lower the learning rate")
    assert isinstance(_last_error("error [W999]: unknown"), RankError)
    assert _last_error("all is well") is None
    assert json.dumps(error.as_dict())
