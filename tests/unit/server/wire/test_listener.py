"""Strangers that connect and say nothing: bounded in number and in time, while those with the token are served."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.client import Client
from weft.server.wire import handshake, listener
from weft.server.wire.handshake import connect_known
from weft.server.wire.listener import SocketListener
from weft.server.wire.sockets import Endpoint

TOKEN = "only for tests"
NUM_STRANGERS = 500
FEW_DESCRIPTORS = 128
SERVER = f"""
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW_DESCRIPTORS}, {FEW_DESCRIPTORS}))
from pathlib import Path
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec
server = Server(index=0, spec=NodeSpec(), folder=Path(sys.argv[1]), token={TOKEN!r})
print(server.start().port, flush=True)
sys.stdin.read()
server.stop()
"""


@contextlib.contextmanager
def server_with_few_descriptors(folder: Path) -> Iterator[tuple[Endpoint, int]]:
    """The endpoint and pid of a server in a process of its own, which ends with the `with` block."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield Endpoint("127.0.0.1", int(process.stdout.readline())), process.pid
    finally:
        process.communicate(timeout=30)


@contextlib.contextmanager
def strangers(endpoint: Endpoint) -> Iterator[list[socket.socket]]:
    """Connections that never say a word; more come as fast as the server lets them."""
    opened: list[socket.socket] = []
    try:
        for _ in range(NUM_STRANGERS):
            opened.append(socket.create_connection((endpoint.host, endpoint.port), timeout=10))
        yield opened
    finally:
        for connection in opened:
            connection.close()


@contextlib.contextmanager
def client_of(endpoint: Endpoint, number: int) -> Iterator[Client]:
    client = Client(lambda index: endpoint, num_servers=1, token=TOKEN, client_id=number)
    try:
        yield client
    finally:
        client.close()


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hundreds_of_strangers_do_not_keep_a_server_from_its_work(tmp_path: Path) -> None:
    keys, ones = np.arange(4), np.ones((4, 3), np.float32)
    sgd = RowOptimizer(kind="sgd", learning_rate=1.0)
    table = TableSpec(name="t", dim=3, optimizer=sgd, init=RowInit(kind="zeros"))
    with server_with_few_descriptors(tmp_path) as (endpoint, pid), client_of(endpoint, 1) as worker:
        worker.create(table)
        calm = num_descriptors(pid)
        with strangers(endpoint):
            worker.push({"t": (keys, ones)})  # an idle worker was not hung up on
            worker.snapshot()
            with client_of(endpoint, 2) as late:  # and a new one gets in
                late.create(table)
                late.push({"t": (keys, ones)})
                late.snapshot()
            assert num_descriptors(pid) < FEW_DESCRIPTORS - 16
            wait_until(lambda: num_descriptors(pid) <= calm + 4)  # though nobody has closed them
        assert (worker.pull({"t": keys}).rows["t"] == -2).all()
        assert worker.stats()[0]["hung_up"] >= NUM_STRANGERS


def test_the_handshake_has_one_deadline_however_slowly_bytes_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_S", 0.3)
    listening = SocketListener(lambda connection, reader: None, token=TOKEN, host="127.0.0.1", port=0)
    endpoint = listening.start()
    with socket.create_connection((endpoint.host, endpoint.port)) as slow, contextlib.suppress(OSError):
        for _ in range(18):  # fewer than a hello has
            slow.sendall(b"W")
            time.sleep(0.1)
    wait_until(lambda: listening.num_hung_up == 1)
    listening.stop()


def test_the_oldest_stranger_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_PENDING", 3)
    served = threading.Event()
    listening = SocketListener(lambda connection, reader: served.set(), token=TOKEN, host="127.0.0.1", port=0)
    endpoint = listening.start()
    opened = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(5)]
    wait_until(lambda: listening.num_hung_up >= 2)  # more, where the machine is so slow that others time out
    for connection in opened[:2]:
        connection.settimeout(10)
        assert connection.recv(1) == b""
    connect_known(endpoint, TOKEN, peer="it").close()
    assert served.wait(10)
    for connection in opened:
        connection.close()
    listening.stop()


def test_an_accept_that_fails_is_no_end_and_no_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = SocketListener(lambda connection, reader: None, token=TOKEN, host="127.0.0.1", port=0)
    calls = []

    class Exhausted:
        def accept(self) -> None:
            calls.append(time.monotonic())
            raise OSError(24, "Too many open files")

    thread = threading.Thread(target=listening._accept, args=(Exhausted(),), daemon=True)
    listening._socket = Exhausted()  # type: ignore[assignment]
    thread.start()
    time.sleep(0.5)
    listening._socket = None
    thread.join(10)
    assert not thread.is_alive()
    assert 2 <= len(calls) < 50
