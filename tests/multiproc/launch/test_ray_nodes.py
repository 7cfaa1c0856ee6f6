"""A training on a local Ray: nodes as actors, the same curve, failures by name, a lost node started again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import last_step, metrics, train_here, write_corpus, write_run
from tolerances import SAME_CURVE_LOSS_ABS

from weft.core.errors import BadValueError, ConfigFileError, PlaceError

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Four cores, whatever this machine has."""
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def job(folder: Path, *words: str, **changes: Any) -> Any:
    from weft.launch.places.ray_job import RayJob

    given: dict[str, Any] = {"nodes": 2, "ranks_per_node": 1, "cpus_per_node": 1, "strategy": "PACK"} | changes
    environment = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    documents = {"run.toml": (folder / "run.toml").read_text(encoding="utf-8")}
    fixed = {"gpus_per_node": 0, "folder": str(folder), "environment": environment, "documents": documents}
    return RayJob(name="test", words=words, **fixed, **given)


def run(job: Any) -> None:
    from weft.launch.places.ray_nodes import run_on_ray

    run_on_ray(job)


def train(folder: Path) -> tuple[str, ...]:
    return ("train", "run.toml", "--device", "cpu", "--out", str(folder / "out"), "--continue")


@pytest.mark.extended
def test_two_nodes_train_the_curve_of_one_process(cluster: None, tmp_path: Path, capfd: Any) -> None:
    corpus = write_corpus(tmp_path / "texts")
    write_run(tmp_path / "run.toml", corpus)
    run(job(tmp_path, *train(tmp_path)))
    assert last_step(tmp_path / "out") == 12
    assert "2 ranks" in capfd.readouterr().err  # the output of the first node
    train_here(tmp_path / "alone", corpus)
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("out", "alone")]
    assert losses[0] == pytest.approx(losses[1], abs=SAME_CURVE_LOSS_ABS)


@pytest.mark.slow
def test_failures_are_named(cluster: None, tmp_path: Path) -> None:
    write_run(tmp_path / "run.toml", write_corpus(tmp_path / "texts"))
    with pytest.raises(ConfigFileError, match=r"none\.toml"):
        run(job(tmp_path, "train", "none.toml", "--out", "x"))
    with pytest.raises(PlaceError, match="no room for 2 nodes of 3 CPU"):
        run(job(tmp_path, *train(tmp_path), cpus_per_node=3, patience_s=3.0))
    with pytest.raises(BadValueError, match=r"train\.steps"):
        run(job(tmp_path, *train(tmp_path), "--set", "train.steps=0"))


@pytest.mark.slow
def test_a_lost_node_is_started_again_from_the_checkpoint(cluster: None, tmp_path: Path, capfd: Any) -> None:
    settings = {"train.steps": 400, "checkpoint.every": 20, "train.collective_timeout_s": 30}
    write_run(tmp_path / "run.toml", write_corpus(tmp_path / "texts"), settings)

    def kill_one() -> None:
        while last_step(tmp_path / "out") < 45:
            time.sleep(0.05)
        actors = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal() and is_actor(path)]
        os.kill(actors[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    run(job(tmp_path, *train(tmp_path), max_restarts=1))
    killer.join()
    assert last_step(tmp_path / "out") == 400
    assert "a node of the job was lost" in capfd.readouterr().err


def is_actor(process: Path) -> bool:
    try:
        return b"ray::NodeActor" in (process / "cmdline").read_bytes()
    except OSError:
        return False
