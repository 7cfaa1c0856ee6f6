"""The batch script of `weft launch` under a real Slurm: to the end, and over the time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import net_hosts
import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster
from tiny_run import call_weft, checkpoint_steps, environment, last_step, metrics, write_corpus, write_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (net_hosts.IS_POSSIBLE and slurm_cluster.IS_POSSIBLE), reason="needs root, iproute2, sshd and Slurm"
    ),
]
PATIENCE_S = 300
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Submitted:
    """A job of two nodes with a rank each, submitted by `weft launch`."""

    def __init__(self, cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cluster, self._folder, self._patch = cluster, folder, monkeypatch
        self.out, self.id = folder / "out", ""

    def submit(self, *, steps: int) -> None:
        settings = {"train.steps": steps, "checkpoint.every": 50, "train.collective_timeout_s": 60}
        write_run(self._folder / "run.toml", write_corpus(self._folder / "texts"), settings)
        outer = environment(self._folder / "cache", SLURM_CONF=self._cluster.environment["SLURM_CONF"])
        for name, value in outer.items():
            self._patch.setenv(name, value)
        self._patch.chdir(self._folder)
        site = ("--set", f"job.python={sys.executable}", "--set", "slurm.log=job.log")
        size = ("--nodes", "2", "--ranks-per-node", "1", *site, "--submit")
        verb = ("train", "run.toml", "--device", "cpu", "--out", "out")
        code, out, err = call_weft("launch", "--on", "slurm", *size, "--", *verb)
        assert code == 0, err
        self.id = out.strip()

    @property
    def log(self) -> str:
        path = self._folder / "job.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def fields(self) -> dict[str, str]:
        words = self._cluster.query("scontrol", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.fields}\n{self.log[-4000:]}\n{self._cluster.logs()}"
            time.sleep(0.2)

    def wait_for_end(self) -> None:
        self.wait(lambda: self.fields["JobState"] in ENDED)
        assert self.fields["JobState"] == "COMPLETED", self.log


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    net = net_hosts.net_hosts(tmp_path / "net", 2)
    with net as hosts, slurm_cluster.slurm_cluster(tmp_path / "slurm", hosts) as found:
        yield found


@pytest.fixture
def job(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitted:
    return Submitted(cluster, tmp_path, monkeypatch)


def test_a_training_ends_and_the_job_queued_again_ends_at_once(cluster: SlurmCluster, job: Submitted) -> None:
    job.submit(steps=20)
    job.wait_for_end()
    assert last_step(job.out) == 20
    assert "2 ranks" in job.log
    cluster.query("scontrol", "requeue", job.id)
    job.wait(lambda: "has finished all 20 steps" in job.log)
    job.wait_for_end()


def test_before_the_time_limit_ranks_save_and_the_next_start_continues(cluster: SlurmCluster, job: Submitted) -> None:
    job.submit(steps=100_000)
    job.wait(lambda: last_step(job.out) >= 10)
    # What Slurm sends `signal_s` before the limit: USR1, to the batch shell alone.
    cluster.query("scancel", "--batch", "--signal=USR1", job.id)
    job.wait(lambda: "resuming from step" in job.log)
    assert "the time limit is near" in job.log
    assert job.fields["Restarts"] == "1"
    saved = checkpoint_steps(job.out)[-1]
    job.wait(lambda: last_step(job.out) >= saved + 5)
    steps = [line["step"] for line in metrics(job.out)]
    assert steps == list(range(1, len(steps) + 1))  # none twice, none left out
