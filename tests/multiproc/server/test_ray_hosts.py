"""Two hosts: network namespaces with a wire between them, a Ray daemon in each, and nothing shared but the folder.

Whatever listens on a loopback address cannot be reached from the other one, so a run that ends here has carried the
right addresses. Not two machines: they have one disk, one clock and one table of processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from weft.core.server_spec import ServerRun
from weft.server.job.driver import run_job

pytestmark = pytest.mark.slow
PORT = 6399
NUM_CPUS = 2  # of each host: four actors, so both must be used


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    def processes(self) -> list[tuple[int, str]]:
        """(pid, title) of all that runs here; Ray gives actors titles."""
        told = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        found = []
        for pid in map(int, told.stdout.split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.append((pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
        return found

    def end(self) -> None:
        """By pid: `ray stop` ends the Ray of the whole machine, for namespaces share the table of processes."""
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: not self.processes(), timeout_s=10)


@dataclass(frozen=True)
class Cluster:
    here: Host
    there: Host
    environment: dict[str, str]

    @property
    def address(self) -> str:
        return f"{self.here.address}:{PORT}"


def _until(is_true: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    name = f"weft{os.getpid()}"
    pair = Host(f"{name}a", "10.77.0.1"), Host(f"{name}b", "10.77.0.2")
    try:
        _ip("netns", "add", pair[0].namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        _ip("netns", "add", pair[1].namespace)
        ends = [f"w{os.getpid()}{side}" for side in "ab"]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(pair, ends, strict=True):
            _ip("link", "set", end, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield pair
    finally:
        for host in pair:
            with contextlib.suppress(subprocess.CalledProcessError):
                host.end()
                _ip("netns", "del", host.namespace)


@pytest.fixture
def cluster(hosts: tuple[Host, Host]) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    here, there = hosts
    # A token of its own: this Ray's head asks for one, and any other on the machine must not be let in.
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)  # a launcher of this process may have set it
    scratch = tempfile.mkdtemp(prefix="weft-ray", dir="/tmp")  # short: Ray makes sockets in it
    found = Cluster(here, there, environment)
    try:
        _start_ray(found, here, "--head", "--port", str(PORT), "--temp-dir", scratch, "--include-dashboard", "false")
        _start_ray(found, there, "--address", found.address)
        yield found
    finally:
        for host in hosts:
            host.end()
        shutil.rmtree(scratch, ignore_errors=True)


def _start_ray(cluster: Cluster, host: Host, *arguments: str) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    fixed = ["--node-ip-address", host.address, "--num-cpus", str(NUM_CPUS), "--disable-usage-stats"]
    command = host.command(ray, "start", *fixed, *arguments)
    told = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stdout + told.stderr


def _run(**server: Any) -> ServerRun:
    return ServerRun.from_tables(
        {
            "model": {"embedding_dim": 4, "hidden": [8]},
            "data": {"samples": 20_000, "vocabulary": 1000, "categorical": 5, "numeric": 2},
            "train": {"steps": 300, "global_batch": 64},
            "server": {"workers": 2, "servers": 2, **server},
            "checkpoint": {"every": 50},
            "logging": {"tensorboard": False},
        }
    )


def _curve(out: Path) -> list[float]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def _train(cluster: Cluster, folder: Path) -> subprocess.Popen[str]:
    (folder / "run.toml").write_text(_run(launcher="ray").to_toml())
    command = [sys.executable, "-m", "weft.cli.main", "server", "train", str(folder / "run.toml")]
    where = ["--address", cluster.address, "--out", str(folder / "ray")]
    return subprocess.Popen(
        cluster.here.command(*command, *where),
        env=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_servers_and_workers_on_two_hosts_give_the_curve_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    run_job(_run(launcher="in_process"), tmp_path / "calm", quiet=True)
    driver = _train(cluster, tmp_path)
    try:
        _until(lambda: len(_curve(tmp_path / "ray")) >= 5 or driver.poll() is not None)
        actors = [(pid, title) for pid, title in cluster.there.processes() if title.startswith("ray::")]
        assert any("WorkerActor" in title for _, title in actors), actors
        server = next(pid for pid, title in actors if "ServerActor" in title)
        os.kill(server, signal.SIGKILL)
        said, _ = driver.communicate(timeout=150)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 0, said
    events = json.loads((tmp_path / "ray" / "server.json").read_text())["events"]
    up = [event["host"] for event in events if event["event"] == "server up"]
    assert len(up) == 3  # the killed one came back
    assert set(up) == {cluster.here.address, cluster.there.address}
    assert _curve(tmp_path / "ray") == _curve(tmp_path / "calm")
