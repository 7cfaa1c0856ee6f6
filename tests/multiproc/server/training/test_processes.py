"""Servers and workers as processes: what is killed comes back and changes nothing; nothing outlives the driver."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_run import children_of

from weft.core.server_spec import ServerRun
from weft.server.job.driver import run_job

FOLDER = Path(__file__).parent


class _Driver:
    """A run under way."""

    def __init__(self, folder: Path, name: str, *, resume: bool = False, **server: Any) -> None:
        tables = _tables(**server)
        self.out = folder / name
        path = folder / f"{name}.json"
        path.write_text(json.dumps(tables))
        command = [
            sys.executable,
            str(FOLDER / "server_run.py"),
            str(self.out),
            str(path),
            *(["--resume"] if resume else []),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    def wait(self) -> str:
        _, errors = self.process.communicate(timeout=120)
        return errors

    def wait_for_step(self, step: int) -> None:
        _until(lambda: len(self.lines()) >= step or self.process.poll() is not None)

    def lines(self) -> list[dict[str, Any]]:
        return _lines(self.out)

    def children(self, role: str) -> list[int]:
        return [pid for pid, command in children_of(self.process.pid) if f"weft.server.main\0{role}" in command]


def _tables(
    *,
    steps: int = 30,
    workers: int = 2,
    servers: int = 2,
    place: str = "servers",
    factory: str | None = None,
    **server: Any,
) -> dict[str, Any]:
    return {
        "model": {"embedding_dim": 4, "hidden": [8], "factory": factory},
        "dense": {"place": place},
        "data": {"samples": 20_000, "vocabulary": 1000, "categorical": 5, "numeric": 2},
        "train": {"steps": steps, "global_batch": 64},
        "server": {"workers": workers, "servers": servers, **server},
        "evaluation": {"every": 15},
        "checkpoint": {"every": 10},
        "logging": {"tensorboard": False},
    }


def _until(is_true: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def _lines(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _curve(out: Path) -> list[tuple[float, float | None]]:
    return [(line["loss"], line.get("auc")) for line in _lines(out)]


def _require_no_token(commands: list[str]) -> None:
    """Every user of the machine can read command lines."""
    for command in commands:
        assert not any(len(part) >= 32 and set(part) <= set("0123456789abcdef") for part in command.split("\0"))


@pytest.mark.slow
def test_killed_servers_and_workers_come_back_and_change_nothing(tmp_path: Path) -> None:
    hit = _Driver(tmp_path, "hit")
    run_job(ServerRun.from_tables(_tables(launcher="in_process")), tmp_path / "calm", quiet=True)
    for step, role in ((3, "worker"), (8, "server"), (14, "server")):
        hit.wait_for_step(step)
        os.kill(hit.children(role)[-1], signal.SIGKILL)
        _require_no_token([command for _, command in children_of(hit.process.pid)])
    errors = hit.wait()
    assert hit.process.returncode == 0, errors
    assert _curve(hit.out) == _curve(tmp_path / "calm")
    assert json.loads((hit.out / "ledger.json").read_text())["restarts"] >= 3


@pytest.mark.slow
def test_an_interrupt_stops_between_steps_and_a_resume_goes_on(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", steps=400)
    driver.wait_for_step(5)
    driver.process.send_signal(signal.SIGINT)
    errors = driver.wait()
    assert driver.process.returncode == 0, errors
    assert "stopped at step" in errors
    stopped = len(driver.lines())
    assert 5 <= stopped < 400
    resumed = _Driver(tmp_path, "run", steps=stopped + 5, resume=True)
    errors = resumed.wait()
    assert f"going on after step {stopped}" in errors
    assert [line["step"] for line in resumed.lines()] == list(range(1, stopped + 6))


@pytest.mark.slow
def test_nothing_outlives_a_killed_driver(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", steps=100_000)
    driver.wait_for_step(2)
    children = [pid for pid, _ in children_of(driver.process.pid)]
    assert len(children) == 4
    driver.process.kill()
    driver.wait()
    _until(lambda: not any(_is_alive(pid) for pid in children), timeout_s=10)


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_too_many_deaths_end_the_run_with_one_sentence(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", steps=100_000, max_restarts=0)
    driver.wait_for_step(2)
    os.kill(driver.children("worker")[0], signal.SIGKILL)
    errors = driver.wait()
    assert driver.process.returncode == 3
    assert "error [W814]: worker 0 was killed by SIGKILL, and 0 restarts are used up" in errors


@pytest.mark.slow
def test_without_a_log_a_dead_server_ends_the_run(tmp_path: Path) -> None:
    """Started again it would lack units that nobody does a second time, and all would wait."""
    driver = _Driver(tmp_path, "run", steps=100_000, durability="none")
    driver.wait_for_step(2)
    os.kill(driver.children("server")[0], signal.SIGKILL)
    errors = driver.wait()
    assert driver.process.returncode == 3
    assert "error [W811]: server 0 was killed by SIGKILL, and without a log" in errors


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo"])
def test_the_other_modes_survive_a_killed_worker(tmp_path: Path, mode: str) -> None:
    driver = _Driver(tmp_path, "run", steps=40, mode=mode, geo_steps=5)
    driver.wait_for_step(5)
    os.kill(driver.children("worker")[0], signal.SIGKILL)
    errors = driver.wait()
    assert driver.process.returncode == 0, errors
    assert [line["samples"] for line in driver.lines()] == [64] * 40


@pytest.mark.slow
def test_a_server_that_dies_under_the_drivers_eyes_is_started_again(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", factory="server_run:build")
    errors = driver.wait()
    assert driver.process.returncode == 0, errors
    assert [line["step"] for line in driver.lines() if "auc" in line] == [15, 30]


@pytest.mark.slow
def test_a_stopped_workers_unit_goes_to_another_after_its_lease(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", steps=60, lease_s=1.0)
    driver.wait_for_step(5)
    os.kill(driver.children("worker")[0], signal.SIGSTOP)
    errors = driver.wait()
    assert driver.process.returncode == 0, errors
    assert [line["samples"] for line in driver.lines()] == [64] * 60


@pytest.mark.slow
def test_replicated_parameters_need_every_worker(tmp_path: Path) -> None:
    driver = _Driver(tmp_path, "run", steps=100_000, place="replicated")
    driver.wait_for_step(5)
    os.kill(driver.children("worker")[0], signal.SIGKILL)
    errors = driver.wait()
    assert driver.process.returncode == 3
    assert "error [W814]" in errors
    assert "need all" in errors


@pytest.mark.slow
def test_a_campaign_of_kills_changes_nothing(tmp_path: Path) -> None:
    hit = _Driver(tmp_path, "hit", steps=400, workers=3)
    run_job(ServerRun.from_tables(_tables(steps=400, workers=3, launcher="in_process")), tmp_path / "calm", quiet=True)
    hit.wait_for_step(2)
    dice, num_kills = random.Random(0), 0
    while hit.process.poll() is None and num_kills < 20:
        children = hit.children(dice.choice(["worker", "worker", "server"]))
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(children), signal.SIGKILL)
                num_kills += 1
        time.sleep(dice.uniform(0.1, 1.5))
    errors = hit.wait()
    assert hit.process.returncode == 0, errors
    assert num_kills >= 5
    assert _curve(hit.out) == _curve(tmp_path / "calm")
