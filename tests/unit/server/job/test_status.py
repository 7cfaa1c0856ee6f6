"""A run seen from outside while it goes on and after: status, and a worker that joins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import RunFolderError
from weft.core.server_spec import ServerRun
from weft.server.job.driver import run_job
from weft.server.job.status import LIVE, join_live, read_status
from weft.server.wire.control import ControlServer
from weft.server.worker import worker

TABLES = {
    "data": {"samples": 2000, "vocabulary": 50, "categorical": 4, "numeric": 2},
    "train": {"steps": 120, "global_batch": 16},
    "model": {"embedding_dim": 4, "hidden": [8]},
    "server": {"launcher": "in_process", "workers": 2, "servers": 2},
    "evaluation": {"every": 0},
    "logging": {"tensorboard": False},
}


def test_a_live_run_answers_and_takes_one_worker_more(tmp_path: Path) -> None:
    calm = run_job(ServerRun.from_tables(TABLES), tmp_path / "calm", quiet=True)
    out, ended = tmp_path / "run", []
    driver = threading.Thread(target=lambda: ended.append(run_job(ServerRun.from_tables(TABLES), out, quiet=True)))
    driver.start()
    while not (out / LIVE).exists():
        driver.join(0.01)
    assert (out / LIVE).stat().st_mode & 0o077 == 0, "the token is for its owner alone"
    guest = threading.Thread(target=join_live, args=(out,))
    guest.start()
    seen = []
    while driver.is_alive():
        seen.append(read_status(out))
        driver.join(0.02)
    guest.join(10)
    assert not guest.is_alive()
    live = [status for status in seen if status["is_live"]]
    assert live
    assert max(len(status["servers"]) for status in live) == 2
    after = read_status(out)
    assert not after["is_live"]
    assert after["steps"] == 120
    workers = {worker["name"].split()[0] for worker in after["workers"]}
    assert "guest" in workers, "it was given units"
    assert ended[0]["run"]["final_loss"] == calm["run"]["final_loss"], "sync does not depend on who computes"


def test_nobody_joins_a_run_that_has_ended(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run is going on"):
        join_live(tmp_path)


def test_a_worker_that_finds_nobody_to_take_leave_of_has_done_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has ended, and its coordinator with it, between the worker's last question and its leave."""

    def answer(verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        return {"run": {"server": {"lease_s": 60.0}}}

    def work(*_: Any, **__: Any) -> None:
        coordinator.stop()

    coordinator = ControlServer(answer, token="t")
    monkeypatch.setattr(worker, "_work", work)
    worker.run_worker(coordinator.start(), token="t", name="guest", is_guest=True)
