"""Hosts with their own network, name and sshd: equal curves, and nothing left after any kill or cut within 10 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bad_wire import bad_wire
from net_hosts import IS_POSSIBLE, NetHosts, net_hosts
from tiny_run import curve, last_step, metrics

LAUNCHER = Path(__file__).with_name("hosts_script.py")
RANK_SCRIPT = Path(__file__).with_name("rank_script.py")
PATIENCE_S = 120.0
BOUND_S = 10.0  # from a kill or a cut to the last of our processes
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not IS_POSSIBLE, reason="needs root, iproute2 and sshd")]

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
global_batch = 12
collective_timeout_s = 20
[checkpoint]
every = 2
keep = 3
[ledger]
dry_run = false
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetHosts]:
    """Three hosts whose own names are 127.0.1.1, as on Debian."""
    with net_hosts(tmp_path_factory.mktemp("net") / "hosts", 3, is_named_loopback=True) as found:
        yield found


def wait_for(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < patience_s, "gave up waiting"
        time.sleep(0.05)
    return time.monotonic() - started


@contextmanager
def launcher(net: NetHosts, cwd: Path, **fields: Any) -> Iterator[subprocess.Popen[str]]:
    fields = {
        "hosts": "host1:1,host2:1",
        "connect_timeout_s": 120,
        "directory": str(cwd),
        "ssh_options": net.ssh_options,
        **fields,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_TOKEN": "a-secret"}
    command = [sys.executable, str(LAUNCHER), json.dumps(fields)]
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def scripted(hosts: NetHosts, folder: Path, mode: str = "forever", **fields: Any) -> Iterator[subprocess.Popen[str]]:
    """Two hosts with a rank of rank_script.py each, past step 3."""
    program, command = [str(RANK_SCRIPT)], [mode, str(folder)]
    with launcher(hosts, folder, program=program, command=command, **fields) as process:
        wait_for(lambda: all((folder / f"pid-{rank}").exists() for rank in (0, 1)) or process.poll() is not None)
        yield process


def ours(hosts: NetHosts) -> list[int]:
    places = range(len(hosts.names))
    return [pid for place in places for words in ("rank_script", "host_agent") for pid in hosts.commands(place, words)]


def test_the_curve_over_two_hosts_is_that_of_one(hosts: NetHosts, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN % 6)
    command = ["train", "run.toml", "--out", "runs/two"]
    with launcher(hosts, tmp_path, command=command, folder="runs/two") as process:
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    one = [sys.executable, "-m", "weft", "train", "run.toml", "--nproc", "2", "--out", "runs/one"]
    subprocess.run(one, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    assert curve(tmp_path / "runs/two") == curve(tmp_path / "runs/one")
    logs = list((tmp_path / "runs/two/logs").rglob("host1-rank-0.stderr"))
    assert len(logs) == 1
    assert "finished at step 6" in logs[0].read_text()
    assert "finished at step 6" in err


def test_nothing_secret_is_in_a_list_of_processes(hosts: NetHosts, tmp_path: Path) -> None:
    with scripted(hosts, tmp_path) as process:
        lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        rank = hosts.commands(1, "rank_script")[0]
        assert b"HF_TOKEN=a-secret" in Path(f"/proc/{rank}/environ").read_bytes()
        assert not any(b"a-secret" in line for line in lines)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err  # Ctrl-C: the ranks of all hosts have saved
    assert all((tmp_path / f"saved-{rank}").exists() for rank in (0, 1))
    wait_for(lambda: not ours(hosts), patience_s=BOUND_S)


@pytest.mark.parametrize("attempt", range(int(os.environ.get("WEFT_TEST_ATTEMPTS", "1"))))
@pytest.mark.parametrize("what", ["launcher", "agent", "link"])
def test_nothing_is_left_within_the_bound(hosts: NetHosts, tmp_path: Path, what: str, attempt: int) -> None:
    with scripted(hosts, tmp_path) as process:
        assert len(ours(hosts)) >= 4
        started = time.monotonic()
        try:
            if what == "launcher":
                process.kill()
            elif what == "agent":
                os.kill(hosts.commands(1, "host_agent")[-1], signal.SIGKILL)
            else:
                hosts.set_link(1, "down")
            wait_for(lambda: not ours(hosts), patience_s=BOUND_S)
            print(f"{what}: nothing left after {time.monotonic() - started:.1f} s", file=sys.__stderr__)
            _, err = process.communicate(timeout=PATIENCE_S)
            if what != "launcher":
                print(f"{what}: message after {time.monotonic() - started:.1f} s: {err[-300:]}", file=sys.__stderr__)
                assert process.returncode == 3
                assert "error [W705]: host2 (rank 1) was lost: its " in err
        finally:
            hosts.set_link(1, "up")


def test_a_lost_host_is_left_out_and_taken_back(hosts: NetHosts, tmp_path: Path) -> None:
    """3 -> 2 -> 3 hosts: the curve is that of one layout within rounding, and no step is lost or repeated in it."""
    (tmp_path / "run.toml").write_text(RUN % 200)
    command = ["train", "run.toml", "--out", "runs/elastic"]
    fields = {"hosts": "host1:1,host2:1,host3:1", "max_restarts": 3, "min_hosts": 2, "folder": "runs/elastic"}
    run = tmp_path / "runs/elastic"
    with launcher(hosts, tmp_path, command=command, **fields) as process:
        wait_for(lambda: last_step(run) >= 10 or process.poll() is not None)
        hosts.kill(2)
        at_loss = last_step(run)
        wait_for(lambda: last_step(run) >= at_loss + 20 or process.poll() is not None)
        hosts.revive(2)
        _, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    assert "host3 (rank 2) was lost" in err
    assert "restarting on host1, host2 (2 ranks) (1 of 3)" in err
    assert "more hosts are available: continuing on host1, host2, host3 (3 ranks)" in err
    one = [sys.executable, "-m", "weft", "train", "run.toml", "--nproc", "3", "--out", "runs/one"]
    subprocess.run(one, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    found, expected = metrics(run), metrics(tmp_path / "runs/one")
    assert [line["step"] for line in found] == list(range(1, 201))
    assert [line["tokens"] for line in found] == [line["tokens"] for line in expected]
    worst = max(abs(a["loss"] - b["loss"]) for a, b in zip(found, expected, strict=True))
    print(f"largest difference of a loss: {worst:.2e}", file=sys.__stderr__)
    assert worst < 1e-4


def test_states_come_back_from_memory_of_the_other_host(hosts: NetHosts, tmp_path: Path) -> None:
    """No disk checkpoint: a lost rank finds its copy on its host, a lost agent's rank on the other host."""
    (tmp_path / "run.toml").write_text((RUN % 150).replace("every = 2", "every = 0\nmemory_every = 1"))
    run = tmp_path / "runs/memory"
    command = ["train", "run.toml", "--out", "runs/memory"]
    with launcher(hosts, tmp_path, command=command, max_restarts=2, folder="runs/memory") as process:
        out = []
        for words in ("weft train", "host_agent"):
            at = last_step(run)
            wait_for(lambda at=at: last_step(run) >= at + 15 or process.poll() is not None)  # type: ignore[misc]
            out.append(last_step(run))
            for pid in hosts.commands(1, words):
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: last_step(run) < 0 or last_step(run) > out[-1] + 2 or process.poll() is not None)
        output, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (output + err).count("copies in memory") >= 2, output + err
    assert "1 of them from another host" in output + err
    one = [sys.executable, "-m", "weft", "train", "run.toml", "--nproc", "2", "--out", "runs/one"]
    subprocess.run(one, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    assert curve(run) == curve(tmp_path / "runs/one")


def test_a_lossy_link_is_survived_or_named(hosts: NetHosts, tmp_path: Path) -> None:
    """30% loss and 200 ms each way: either the ranks go on, or one error names the host, and nothing is left."""
    with scripted(hosts, tmp_path, environment={"RANK_TIMEOUT_S": "20"}) as process:
        started = time.monotonic()
        with bad_wire(hosts, 1, loss=0.3, delay_s=0.2):
            while process.poll() is None and time.monotonic() - started < 90:
                time.sleep(0.1)
            ended_s = time.monotonic() - started
            if process.poll() is None:
                print(f"a lossy link: still running after {ended_s:.0f} s", file=sys.__stderr__)
                process.kill()
            else:
                _, err = process.communicate(timeout=PATIENCE_S)
                print(f"a lossy link: ended after {ended_s:.0f} s: {err[-300:]}", file=sys.__stderr__)
                assert "error [W70" in err
                assert "host2" in err
            wait_for(lambda: not ours(hosts), patience_s=2 * BOUND_S)
