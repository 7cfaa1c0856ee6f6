"""Bytes that this process has sent over TCP, from the kernel's counters of its sockets.

That is how the traffic of a backend is measured which counts nothing itself: with headers, without retransmissions.
"""

from __future__ import annotations

import os
import socket
import struct
import sys

_TCP_INFO = 11
_BYTES_SENT, _BYTES_RETRANSMITTED = 200, 208  # offsets in the kernel's `struct tcp_info`, since Linux 4.19


def sent_over_tcp() -> int | None:
    """The sum over open sockets; None where the kernel does not tell."""
    if sys.platform != "linux":
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
        total += _sent(copy)
    return total


def _sent(descriptor: int) -> int:
    """Of one descriptor, which is closed; 0 if it is no TCP socket."""
    try:
        with socket.socket(fileno=descriptor) as own:
            if own.type != socket.SOCK_STREAM or own.family not in (socket.AF_INET, socket.AF_INET6):
                return 0
            info = own.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except OSError:
        os.close(descriptor)
        return 0
    if len(info) < _BYTES_RETRANSMITTED + 8:
        return 0
    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
    return int(sent - again)
