"""Servers and workers as Ray actors on this machine: the same curve, and a killed server comes back by Ray's hand."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import MissingExtraError
from weft.core.server_spec import ServerRun
from weft.server.job.driver import run_job


def _run(**server: Any) -> ServerRun:
    return ServerRun.from_tables(
        {
            "model": {"embedding_dim": 4, "hidden": [8]},
            "data": {"samples": 20_000, "vocabulary": 1000, "categorical": 5, "numeric": 2},
            "train": {"steps": 200, "global_batch": 64},
            "server": {"workers": 2, "servers": 2, **server},
            "logging": {"tensorboard": False},
        }
    )


def _curve(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match="needs Ray"):
        run_job(_run(launcher="ray"), tmp_path / "a", quiet=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_actors_give_the_same_curve_and_a_killed_server_comes_back(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    run_job(_run(launcher="in_process"), tmp_path / "calm", quiet=True)
    killer = threading.Thread(target=_kill_a_server, args=(tmp_path / "ray",))
    killer.start()
    try:
        ledger = run_job(_run(launcher="ray"), tmp_path / "ray", quiet=True)
        killer.join()
    finally:
        ray.shutdown()
    assert ledger["run"]["status"] == "finished"
    assert _curve(tmp_path / "ray") == _curve(tmp_path / "calm")
    events = [event["event"] for event in json.loads((tmp_path / "ray" / "server.json").read_text())["events"]]
    assert events.count("server up") == 3


def _kill_a_server(out: Path) -> None:
    import ray
    from ray.util import list_named_actors

    while not (out / "metrics.jsonl").exists() or len(_curve(out)) < 5:
        time.sleep(0.02)
    name = next(name for name in list_named_actors() if name.endswith("/server/1"))
    os.kill(ray.get(ray.get_actor(name).pid.remote()), signal.SIGKILL)
