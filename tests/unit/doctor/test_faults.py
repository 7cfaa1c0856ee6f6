"""Recorded hosts: healthy ones have no warning, and each fault is named by its check, state, detail and fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_hosts import make_host, read_faults

import weft
from weft.doctor.check import OK, UNKNOWN, WARNING, WRONG, Diagnosis
from weft.doctor.examine import PROBES, checks_of, is_of_cluster, record_of
from weft.doctor.machine import Machine
from weft.doctor.situation import Situation

FAULTS = read_faults()
HEALTHY = {"h100": ["node-0", 8, 8], "workstation": ["desk", 1, 0], "laptop": ["laptop", 0, 0]}


def examine(machine: Machine, num_ranks: int | None = None) -> list[Diagnosis]:
    record = record_of(machine)
    return checks_of(record, Situation(num_ranks=num_ranks, is_cluster=is_of_cluster(record)))


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_host_raises_no_alarm(name: str, tmp_path: Path) -> None:
    machine = make_host(name, tmp_path / "host")
    record = record_of(machine)
    assert not record["failed"]
    assert [record["host"], len(record["gpu"]["devices"]), len(record["rdma"]["ports"])] == HEALTHY[name]
    checks = examine(machine)
    assert not [check for check in checks if check.state in (WARNING, WRONG)]
    assert {check.name for check in checks if check.state == UNKNOWN} <= {"gpu.xid"}  # dmesg needs root
    assert len({check.name for check in checks}) == len(checks) >= 18


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["name"])
def test_a_fault_is_named(fault: dict[str, Any], tmp_path: Path) -> None:
    checks = examine(make_host(fault["on"], tmp_path / "host", fault), fault.get("nproc"))
    name, state, words = fault["expect"]
    found = [check for check in checks if check.name == name and check.state == state and words in check.detail]
    assert found, [check for check in checks if check.state != OK]
    assert all(check.fix for check in checks if check.state in (WARNING, WRONG))
    assert fault.get("fix", "") in found[0].fix
    others = {check.name for check in checks if check.state in (WARNING, WRONG)} - {name}
    assert others <= set(fault.get("also", [])), [check for check in checks if check.name in others]


def test_faults_are_many_and_of_every_probe() -> None:
    assert len({fault["name"] for fault in FAULTS}) == len(FAULTS) >= 30


def test_a_probe_that_fails_is_one_unknown_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Machine) -> dict[str, Any]:
        raise ValueError("a format nobody knew")

    monkeypatch.setattr(PROBES["gpu"], "read", fail)
    checks = examine(make_host("laptop", tmp_path / "host"))
    assert ("probe.gpu", UNKNOWN) in {(check.name, check.state) for check in checks}
    assert "a format nobody knew" in checks[0].detail
    assert {"network.name", "disk.space"} <= {check.name for check in checks}


def test_a_host_without_anything_is_unknown_and_not_wrong_by_itself(tmp_path: Path) -> None:
    """macOS has neither /proc nor /sys."""
    (tmp_path / "empty").mkdir()
    machine = Machine(root=tmp_path / "empty", run=lambda _: None, environment={}, folder=Path("/runs"))
    checks = examine(machine)
    assert {check.name for check in checks if check.state == WRONG} == {"packages"}
    assert not [check for check in checks if check.name.startswith("probe.")]


def test_the_module_answers_without_any_package(tmp_path: Path) -> None:
    """`python -m weft.doctor` is for installations that are broken: the standard library is all that it imports."""
    source = Path(weft.__file__).parents[1]
    command = [sys.executable, "-S", "-m", "weft.doctor", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=60, check=False
    )
    checks = {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert checks["packages"] == WRONG  # without site-packages there is no torch
    assert checks["disk.space"] in (OK, WARNING)
