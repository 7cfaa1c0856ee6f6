"""`--bench`: figures of devices are compared within their kind; the worker measures this machine's CPU."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from weft.comm import device_speed
from weft.doctor import bench
from weft.doctor.check import OK, UNKNOWN, WARNING, WRONG


def record(host: str, speeds: list[float], pairs: dict[str, float] | None = None) -> dict[str, Any]:
    devices = [
        {"label": f"GPU {index}", "name": "H100", "matmul_flops": speed * 1e12, "copy_bytes_per_s": 2.5e12}
        for index, speed in enumerate(speeds)
    ]
    listed = [{"label": label, "bytes_per_s": value} for label, value in (pairs or {}).items()]
    reduced = {"ranks": len(speeds), "bus_bytes_per_s": 4e11}
    return {"host": host, "bench": {"devices": devices, "pairs": listed, "all_reduce": reduced}}


@pytest.mark.parametrize(
    ("slow", "state"), [(700.0, OK), (690.0, OK), (600.0, WARNING), (300.0, WRONG)], ids=lambda value: str(value)
)
def test_a_slow_device_is_named(slow: float, state: str) -> None:
    checks = {check.name: check for check in bench.judge([record("a", [700.0, 705.0, slow, 698.0])])}
    assert checks["bench.matmul"].state == state
    assert checks["bench.copy"].state == checks["bench.all-reduce"].state == OK
    if state != OK:
        assert "GPU 2 at " in checks["bench.matmul"].detail
        assert checks["bench.matmul"].fix


def test_hosts_are_compared_with_each_other() -> None:
    records = [record(f"node-{index}", [700.0 if index != 5 else 500.0] * 8) for index in range(8)]
    checks = {check.name: check for check in bench.judge(records)}
    assert checks["bench.matmul"].state == WARNING
    assert checks["bench.matmul"].detail.count("node-5") == 4  # and 4 more


def test_a_slow_pair_is_named() -> None:
    pairs = {"GPU 0 to GPU 1": 380e9, "GPU 1 to GPU 0": 380e9, "GPU 0 to GPU 2": 25e9}
    checks = {check.name: check for check in bench.judge([record("a", [700.0, 700.0], pairs)])}
    assert checks["bench.pairs"].state == WRONG
    assert "GPU 0 to GPU 2 at 7%" in checks["bench.pairs"].detail


def test_a_failed_measurement_is_unknown_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        return subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: CUDA error: out of memory\n")

    monkeypatch.setattr(bench.subprocess, "run", fail)
    found = bench.measure(None)
    assert found == {"error": "RuntimeError: CUDA error: out of memory"}
    (check,) = bench.judge([{"host": "a", "bench": found}])
    assert (check.state, check.detail) == (UNKNOWN, "a: RuntimeError: CUDA error: out of memory")


def test_the_cpu_is_measured() -> None:
    found = device_speed.measure_device(torch.device("cpu"))
    assert (found["label"], found["name"]) == ("CPU", "CPU")
    assert found["matmul_flops"] > 1e8
    assert found["copy_bytes_per_s"] > 1e7


@pytest.mark.extended
def test_this_machine_is_measured_with_an_all_reduce_of_two_ranks() -> None:
    found = bench.measure(2)
    assert not found.get("error"), found
    assert found["all_reduce"]["ranks"] == 2
    assert found["all_reduce"]["bus_bytes_per_s"] > 1e6
    assert {check.state for check in bench.judge([{"host": "this", "bench": found}])} == {OK}
