"""The doctor's end on one of several hosts: its record, connections to the other hosts, the shared folder.

    python -m weft.doctor.peer      orders on stdin, events on stdout: a JSON object per line, empty lines are ignored

    first line {folder, token, mark, bench, num_ranks}  -> record, ports, addresses
    connect {peers: [{host, addresses, ports}]}         -> connections: error, round trip and clock offset of each
    look {marks}                                        -> seen: marks of other hosts in the folder of the run

It ends with stdin, or when the launcher's heartbeats (empty lines) stop for 30 s, and removes its mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from weft.core.network import is_loopback, own_addresses
from weft.doctor.examine import record_of
from weft.doctor.machine import this_machine
from weft.doctor.probes.network import is_virtual

NUM_PORTS = 2
_CONNECT_TIMEOUT_S = 4.0
_LEASE_S = 30.0
_CLOCK = struct.Struct("<d")
_MOST_AT_ONCE = 64


class PortListener:
    """Accepts connections on random ports; one that begins with the token is answered with this host's clock."""

    def __init__(self, token: str, *, num_ports: int = NUM_PORTS) -> None:
        self._token = token.encode()
        self._sockets = [socket.create_server(("", 0)) for _ in range(num_ports)]
        self.ports = [each.getsockname()[1] for each in self._sockets]
        for each in self._sockets:
            threading.Thread(target=self._accept, args=(each,), daemon=True).start()

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes accept(), which would keep the port open
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_CONNECT_TIMEOUT_S)
            if _receive(connection, len(self._token)) == self._token:
                for _ in range(3):  # the fastest of three round trips has the best offset
                    _receive(connection, 1)
                    connection.sendall(_CLOCK.pack(time.time()))


def connect(address: str, port: int, *, token: str, timeout_s: float = _CONNECT_TIMEOUT_S) -> dict[str, Any]:
    """Connect and exchange clocks. `offset_s`: how far the other clock is ahead of this one."""
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(token.encode())
            samples = [_sample(connection) for _ in range(3)]
    except TimeoutError:
        return {"error": "no answer"}
    except ConnectionRefusedError:
        return {"error": "refused"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    round_trip_s, offset_s = min(samples)
    return {"error": "", "round_trip_s": round_trip_s, "offset_s": offset_s}


def _sample(connection: socket.socket) -> tuple[float, float]:
    started, before = time.perf_counter(), time.time()
    connection.sendall(b"?")
    (there,) = _CLOCK.unpack(_receive(connection, _CLOCK.size))
    round_trip_s = time.perf_counter() - started
    return round_trip_s, there - (before + round_trip_s / 2)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionResetError("closed by the other side")
        data += received
    return data


def reachable_addresses(own: dict[str, str], route: str, connected: str) -> list[str]:
    """The addresses under which others may find this host. `connected`: SSH_CONNECTION, whose third word is one."""
    words = connected.split()
    found = [words[2]] if len(words) == 4 else []
    found += sorted((each for each in own if not is_virtual(own[each])), key=lambda each: own[each] != route)
    usable = [each for each in dict.fromkeys(found) if not is_loopback(each) and not each.startswith("fe80")]
    return usable or ["127.0.0.1"]


def reach(peers: Sequence[dict[str, Any]], *, token: str) -> list[dict[str, Any]]:
    """One connection to every port of every peer; the first address that answers is taken."""

    def attempt(peer: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for address in peer["addresses"]:
            tried = [connect(address, port, token=token) for port in peer["ports"]]
            failed = [each for each in tried if each["error"]]
            result = {"host": peer["host"], "address": address, **(failed or tried)[0]}
            result["ports_failed"] = len(failed)
            if not failed:
                break
        return result

    with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as pool:
        return list(pool.map(attempt, peers))


def _lines(orders: IO[str], *, lease_s: float) -> Iterator[str]:
    """Orders without heartbeats, until the input ends or is silent for the lease."""
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def receive() -> None:
        for line in orders:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=receive, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while (line := arrived.get(timeout=lease_s)) is not None:
            if line.strip():
                yield line


def serve(orders: IO[str], events: IO[str]) -> None:
    """Answer orders until the end of the input."""

    def send(event: str, **fields: Any) -> None:
        events.write(json.dumps({"event": event, **fields}) + "\n")
        events.flush()

    lines = _lines(orders, lease_s=_LEASE_S)
    first = json.loads(next(lines))
    machine = this_machine(Path(first["folder"]))
    folder = machine.existing_folder()
    mark = folder / first["mark"]
    listener = PortListener(first["token"])
    try:
        record = record_of(machine)
        if first.get("bench"):
            from weft.doctor.bench import measure

            record["bench"] = measure(first.get("num_ranks"))
        with contextlib.suppress(OSError):  # the probe of the disk reports it
            mark.touch()
        route = record.get("network", {}).get("route", "")
        addresses = reachable_addresses(own_addresses(), route, os.environ.get("SSH_CONNECTION", ""))
        send("record", record=record, ports=listener.ports, addresses=addresses)
        for line in lines:
            order = json.loads(line)
            if order.get("order") == "connect":
                send("connections", results=reach(order["peers"], token=first["token"]))
            elif order.get("order") == "look":
                send("seen", marks=[name for name in order["marks"] if (folder / name).exists()])
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            mark.unlink()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
