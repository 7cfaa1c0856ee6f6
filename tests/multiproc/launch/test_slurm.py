"""`weft train` under a real Slurm: two nodes whose names do not resolve; a dead node, and the job that is requeued."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import net_hosts
import pytest
import slurm_cluster
from slurm_cluster import SlurmCluster
from tiny_run import curve, last_step, metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (net_hosts.IS_POSSIBLE and slurm_cluster.IS_POSSIBLE), reason="needs root, iproute2, sshd and Slurm"
    ),
]
WEFT = f"{sys.executable} -m weft"
RUN = """
[model]
type = "llama"
config = { hidden_size = 32, intermediate_size = 64, num_hidden_layers = 2, num_attention_heads = 4 }
[data]
source = "python-stdlib"
tokenizer = "bytes"
sequence_length = 32
[train]
steps = %d
global_batch = 8
collective_timeout_s = 120
[checkpoint]
every = 5
[ledger]
dry_run = false
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    net = net_hosts.net_hosts(tmp_path / "net", 2)
    with net as hosts, slurm_cluster.slurm_cluster(tmp_path / "slurm", hosts) as found:
        yield found


def wait_for(condition: Callable[[], bool], cluster: SlurmCluster, *, patience_s: float = 120.0) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < patience_s, cluster.logs() + cluster.query("squeue")
        time.sleep(0.1)


def train_here(folder: Path) -> None:
    one = [*WEFT.split(), "train", "run.toml", "--nproc", "2", "--out", "runs/one"]
    subprocess.run(one, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


def test_srun_trains_over_nodes_whose_names_do_not_resolve(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN % 6)
    command = ["srun", "-N2", "--ntasks-per-node=1", *WEFT.split(), "train", "run.toml", "--out", "runs/slurm"]
    started = time.monotonic()
    found = subprocess.run(
        command, cwd=tmp_path, env=cluster.environment, check=False, capture_output=True, text=True, timeout=200
    )
    assert found.returncode == 0, found.stderr + cluster.logs()
    print(f"srun: {time.monotonic() - started:.1f} s", file=sys.__stderr__)
    train_here(tmp_path)
    assert curve(tmp_path / "runs/slurm") == curve(tmp_path / "runs/one")


def test_a_dead_node_requeues_the_job_and_it_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    steps = 300
    (tmp_path / "run.toml").write_text(RUN % steps)
    run, output = tmp_path / "runs/slurm", tmp_path / "job.log"
    words = f"srun --kill-on-bad-exit=1 {WEFT} train run.toml --out {run}"
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\ncd {tmp_path}\n{words}\n")
    options = ["-N2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", "-o", str(output)]
    job = cluster.query("sbatch", "--parsable", *options, str(tmp_path / "job.sh")).strip()
    assert job.isdecimal(), cluster.logs()
    wait_for(lambda: last_step(run) >= 12, cluster)
    cut_at = time.monotonic()
    cluster.stop_node(1)
    wait_for(lambda: "Restarts=1" in cluster.query("scontrol", "show", "job", job), cluster)
    requeued_s, at_cut = time.monotonic() - cut_at, last_step(run)
    cluster.hosts.set_link(1, "up")
    cluster.start_node(1)
    wait_for(lambda: "JobState=COMPLETED" in cluster.query("scontrol", "show", "job", job), cluster, patience_s=300)
    print(f"requeued {requeued_s:.1f} s after the cut, at step {at_cut}", file=sys.__stderr__)
    assert "resuming from step" in output.read_text()
    train_here(tmp_path)
    assert [line["step"] for line in metrics(run)] == list(range(1, steps + 1))
    assert curve(run) == curve(tmp_path / "runs/one")
