"""Real faults of real processes: kill -9 with exact counts, a server that hangs, a torn log, a full disk, strangers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_folder import benchmarks_importable
from waiting import wait_for

from weft.core.errors import LogError, ServerLostError, TokenError, WeftError
from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server import client as client_module
from weft.server.client import Client
from weft.server.job.coordinator import Coordinator
from weft.server.main import TOKEN_VARIABLE
from weft.server.node.state import NodeSpec
from weft.server.wire import handshake as handshake_module
from weft.server.wire.control import ControlClient, ControlServer
from weft.server.wire.sockets import Endpoint

with benchmarks_importable():
    from counting_task import Counted, compare
    from server_faults import Driver, Killer, curve, run_tables, same_bits

TOKEN = "only for tests"
KEYS = np.arange(1000, dtype=np.int64)
SPEC = TableSpec(name="t", dim=64, optimizer=RowOptimizer(kind="sgd", learning_rate=1.0), init=RowInit(kind="zeros"))
MINUS_ONES = np.full((KEYS.size, SPEC.dim), -1.0, np.float32)


class Servers:
    """Servers as processes; their coordinator is this one."""

    def __init__(self, out: Path, *, count: int = 1) -> None:
        self._out, self._count = out, count
        node = NodeSpec(num_servers=count, shares=2).as_dict()
        self.coordinator = Coordinator(assignment={"out": str(out), "node": node})
        self._control = ControlServer(self.coordinator.answer, token=TOKEN)
        self._endpoint = self._control.start()
        self._clients: list[Client] = []
        self.processes = [self._spawn(index) for index in range(count)]
        self._wait()

    @property
    def folder(self) -> Path:
        return self._out / "servers" / "0"

    def kill(self, index: int = 0) -> None:
        self.processes[index].kill()
        self.processes[index].wait()
        self.coordinator.forget_server(index)

    def start(self, index: int = 0) -> None:
        self.processes[index] = self._spawn(index)
        self._wait()

    def client(self, **given: Any) -> Client:
        fields = {"num_servers": self._count, "token": TOKEN, "client_id": 1, "timeout_s": 20.0, **given}
        client = Client(self.coordinator.server_endpoint, **fields)
        self._clients.append(client)
        client.create(SPEC)
        return client

    def stop(self) -> None:
        for index in range(self._count):
            self.kill(index)
        for client in self._clients:
            client.close()
        self._control.stop()

    def _spawn(self, index: int) -> subprocess.Popen[bytes]:
        where = [self._endpoint.host, str(self._endpoint.port)]
        command = [sys.executable, "-m", "weft.server.main", "server", *where, str(index)]
        return subprocess.Popen(command, env={**os.environ, TOKEN_VARIABLE: TOKEN}, stderr=subprocess.DEVNULL)

    def _wait(self) -> None:
        def is_over() -> bool:
            has_all = self.coordinator.wait_for_servers(self._count, timeout_s=0.05)
            return has_all or any(process.poll() is not None for process in self.processes)

        wait_for(is_over)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Servers]:
    found = Servers(tmp_path)
    yield found
    found.stop()


def _count(client: Client) -> float:
    """How many pushes the rows have seen; each adds 1 to every value."""
    rows = client.pull({"t": KEYS}).rows["t"]
    assert (rows == rows[0, 0]).all()
    return float(rows[0, 0])


def _push(client: Client, unit: int) -> None:
    client.push({"t": (KEYS, MINUS_ONES)}, unit=unit, unique=True)


def _stop(pid: int) -> None:
    """SIGSTOP, waited for: the kernel stops a process's threads one by one, and one of them may still answer."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path("/proc", str(pid), "task")
    wait_for(lambda: all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in threads.glob("*/stat")))


def _endpoints(out: Path) -> list[Endpoint]:
    live = json.loads((out / "live.json").read_text())
    control = ControlClient(Endpoint(live["host"], live["port"]), token=live["token"])
    try:
        return [Endpoint(*end) for end in control.ask("status")["endpoints"].values()]
    finally:
        control.close()


def _molest(endpoint: Endpoint) -> None:
    """Garbage, a frame that lies about its length, a peer that says nothing, and one with another token."""
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"WEFT\x01\x02" + b"\xff" * 200, b""):
        with socket.create_connection((endpoint.host, endpoint.port)) as stranger:
            stranger.sendall(garbage)
    client = Client(lambda index: endpoint, num_servers=1, token="another", client_id=1, timeout_s=5)
    with pytest.raises(TokenError):
        client.create(SPEC)
    client.close()


def test_servers_killed_and_molested_while_two_push_count_exactly(tmp_path: Path) -> None:
    """A unit is pushed by both: as after a worker's death, when nobody knows how far it had come."""
    servers = Servers(tmp_path, count=2)
    num_units, pushed = 200, [0, 0]

    def work(worker: int) -> None:
        client = servers.client(client_id=1 + worker)
        for unit in range(worker, num_units):
            _push(client, unit)
            pushed[worker] = unit

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    try:
        for thread in threads:
            thread.start()
        for index, unit in ((0, 20), (1, 22)):
            wait_for(lambda unit=unit: max(pushed) >= unit)
            _molest(servers.coordinator.server_endpoint(1 - index))
            servers.kill(index)
            servers.start(index)
        for thread in threads:
            thread.join()
        client = servers.client(client_id=9)
        assert [stats["units"] for stats in client.stats()] == [num_units] * 2
        assert _count(client) == num_units
    finally:
        servers.stop()


@pytest.mark.slow
def test_a_run_with_kills_and_strangers_counts_exactly(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", run_tables("async", steps=60))
    killer = Killer(driver, random.Random(0))
    driver.wait_for_step(3)
    for endpoint in _endpoints(driver.out):
        _molest(endpoint)
    for role in ("server", "worker"):
        killer.kill(driver.children(role)[0], "training")
    driver.wait_for_step(25)
    killer.kill(driver.children("server")[1], "training")
    ledger = driver.finish()
    assert ledger["restarts"] == killer.kills.total() == 3
    assert compare(driver.run, driver.out, steps=60) == Counted(occurrences=60 * 64 * 8, lost=0, doubled=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_campaign_of_kills_loses_and_doubles_nothing(tmp_path: Path, mode: str) -> None:
    driver = Driver(tmp_path / "hit", run_tables(mode, steps=1_000_000))
    driver.wait_for_step(5)
    killer = Killer(driver, random.Random(7))
    killer.campaign(15)
    driver.interrupt()
    steps = driver.finish()["run"]["steps"]
    counted = compare(driver.run, driver.out, steps=steps)
    assert (counted.lost, counted.doubled) == (0, 0)
    if mode == "sync":
        calm = Driver(tmp_path / "calm", run_tables(mode, steps=steps))
        calm.finish(timeout_s=300)
        assert curve(driver.out) == curve(calm.out)
        assert same_bits(driver.out, calm.out)


def test_a_hung_server_is_told_in_time_and_counts_once_when_it_wakes(
    server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _push(server.client(), 0)  # its first push is slow: kernels are read from their cache
    monkeypatch.setattr(client_module, "_LEAST_SILENCE_S", 1.5)
    monkeypatch.setattr(handshake_module, "HANDSHAKE_S", 1.5)
    client = server.client(timeout_s=1.5, client_id=2)
    _stop(server.processes[0].pid)
    start = time.monotonic()
    with pytest.raises(ServerLostError, match=r"^server 0 did not come back within 1.5 s: it does not answer$"):
        _push(client, 1)
    assert time.monotonic() - start < 20
    os.kill(server.processes[0].pid, signal.SIGCONT)
    awake = server.client(client_id=3)
    _push(awake, 1)  # what the sleeper had got already counts once
    assert _count(awake) == 2


@pytest.mark.slow
def test_a_run_with_a_hung_server_ends_with_one_sentence(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "run", run_tables("sync", steps=100_000, server_timeout_s=3.0))
    driver.wait_for_step(3)
    _stop(driver.children("server")[0].pid)
    start = time.monotonic()
    assert driver.process.wait(60) == 3
    assert time.monotonic() - start < 30
    assert "did not come back within 3 s: it does not answer" in driver.said()
    assert "--resume" in driver.said()


@pytest.mark.parametrize("damage", ["torn", pytest.param("cut", marks=pytest.mark.slow)])
def test_the_end_of_a_log_may_be_torn(server: Servers, damage: str) -> None:
    """torn: half a record that was never acknowledged; cut: the last one is short, and its push comes again."""
    client = server.client()
    for unit in range(3):
        _push(client, unit)
    server.kill()
    log = max((server.folder / "log").glob("log-*.wal"))
    content = log.read_bytes()
    log.write_bytes(content + content[: len(content) // 5] if damage == "torn" else content[:-7])
    server.start()
    for unit in (2, 3):
        _push(client, unit)
    server.kill()
    server.start()
    assert _count(server.client(client_id=2)) == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A few MiB that can really be full."""
    folder = tmp_path / "disk"
    folder.mkdir()
    told = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if told.returncode:
        pytest.skip(f"no small disk can be mounted here: {told.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_refuses_pushes_and_is_forgotten_when_there_is_room(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2 << 20))
    server = Servers(small_disk)
    try:
        client = server.client()
        done = _push_until_full(client)
        assert 0 < done < 16
        for _ in range(2):
            with pytest.raises(LogError, match="No space left on device"):
                _push(client, done)
        with pytest.raises(LogError, match="No space left on device"):
            client.snapshot()
        assert server.processes[0].poll() is None
        assert _count(client) == done  # it still answers, and has what it acknowledged
        ballast.unlink()
        _push(client, done)
        client.snapshot()
        _push(client, done + 1)
        server.kill()
        server.start()
        assert _count(server.client(client_id=2)) == done + 2
    finally:
        server.stop()


@pytest.mark.slow
def test_a_server_that_cannot_start_on_a_full_disk_says_so(small_disk: Path) -> None:
    server = Servers(small_disk)
    try:
        _push_until_full(server.client())
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        server.kill()
        server.start()
        assert server.processes[0].wait() == 3
        failure = server.coordinator.failure
        assert isinstance(failure, WeftError)
        assert "No space left on device" in failure.message
    finally:
        server.stop()


def _push_until_full(client: Client) -> int:
    for unit in range(100):
        try:
            _push(client, unit)
        except LogError:
            return unit
    raise AssertionError("the disk was not full")
