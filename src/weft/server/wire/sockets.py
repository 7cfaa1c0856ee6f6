"""Whole messages over blocking sockets: `recv_into` and `sendmsg` on buffers that the caller keeps.

Both calls drop the interpreter's lock, so threads of one server overlap.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

from weft.server.wire.endpoint import Endpoint

BUFFER_BYTES = 4 << 20
_PIECE = 4 << 20  # a longer receive keeps the kernel copying with nobody sending
_DEAD_PEER_MS = 10_000  # a machine that vanished: TCP alone would wait for a quarter of an hour


def tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    for name, value in (("TCP_USER_TIMEOUT", _DEAD_PEER_MS), ("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(endpoint: Endpoint, *, timeout_s: float) -> socket.socket:
    connection = socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s)
    tune(connection)
    return connection


def receive_some(connection: socket.socket, target: memoryview) -> int:
    """What has come, up to the target's length; waits for the first of it."""
    count = connection.recv_into(target, min(target.nbytes, _PIECE))
    if not count:
        raise ConnectionError("the peer has closed the connection")
    return count


def receive_into(connection: socket.socket, target: Any, *, deadline: float | None = None) -> None:
    """Fills `target`, a writable C-contiguous buffer; raises ConnectionError where the peer ends before.

    `deadline`, of the monotonic clock, is for all of it: a timeout of the socket alone begins anew with every byte.
    """
    whole = memoryview(target)
    left = whole.cast("B") if whole.nbytes else whole  # a view of nothing cannot be cast
    while left.nbytes:
        if deadline is not None:
            connection.settimeout(_seconds_to(deadline))
        left = left[receive_some(connection, left) :]


def _seconds_to(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the peer took too long")
    return left_s


def receive(connection: socket.socket, size: int, *, deadline: float | None = None) -> bytes:
    target = bytearray(size)
    receive_into(connection, target, deadline=deadline)
    return bytes(target)


def send(connection: socket.socket, parts: Iterable[Any]) -> None:
    """All of the buffers, in order, without copying them together."""
    left = [view for view in (memoryview(part).cast("B") for part in parts if len(part)) if view.nbytes]
    while left:
        count = connection.sendmsg(left)
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]
