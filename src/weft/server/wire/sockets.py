"""Whole messages over blocking sockets: `recv_into` and `sendmsg` on buffers of the caller; limits of descriptors.

Both calls release the GIL, so threads of one server overlap. Descriptors are numbered from below: a connection
numbered limit - reserve or higher leaves only the reserve, which the log and snapshots need.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weft.core.synced import write_all

BUFFER_BYTES = 4 << 20
_PIECE = 4 << 20  # a longer receive keeps the kernel copying while the sender waits
_DEAD_PEER_MS = 10_000  # for a lost machine, TCP alone would wait for a quarter of an hour
_WANTED = 65_536  # no job needs more, and some systems allow a billion
_RESERVE = 64


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


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
    """Receives up to the length of the target; waits for the first byte."""
    count = connection.recv_into(target, min(target.nbytes, _PIECE))
    if not count:
        raise ConnectionError("the peer has closed the connection")
    return count


def receive_into(connection: socket.socket, target: Any, *, deadline: float | None = None) -> None:
    """Fills `target`, a writable C-contiguous buffer; raises ConnectionError if the peer closes before that.

    `deadline`, of the monotonic clock, covers all bytes: the timeout of a socket starts again with every byte.
    """
    whole = memoryview(target)
    left = whole.cast("B") if whole.nbytes else whole  # a view of nothing cannot be cast
    while left.nbytes:
        if deadline is not None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the peer took too long")
            connection.settimeout(left_s)
        left = left[receive_some(connection, left) :]


def receive(connection: socket.socket, size: int, *, deadline: float | None = None) -> bytes:
    target = bytearray(size)
    receive_into(connection, target, deadline=deadline)
    return bytes(target)


def send(connection: socket.socket, parts: Iterable[Any]) -> None:
    write_all(parts, lambda left, _: connection.sendmsg(left))


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard one. For processes of our own, not for callers of the library."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the old limit will do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_in_reserve(descriptor: int) -> bool:
    """Whether a connection with this number leaves too few for files: a quarter of a small limit, else 64."""
    if sys.platform == "win32":
        return False
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit != resource.RLIM_INFINITY and descriptor >= limit - min(_RESERVE, limit // 4)
