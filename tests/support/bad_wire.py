"""A wire that loses and delays packets, in user space: not every kernel has netem. Needs root.

host's veth  <->  this program  <->  a veth on the bridge        each packet: lost, or sent `delay_s` later
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import random
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

from net_hosts import NetHosts, call

_SIOCETHTOOL = 0x8946
_OFF = (0x17, 0x1F, 0x24)  # transmit checksums, TCP and generic segmentation: a copied packet must be complete
_FRAME_BYTES = 65_536
_OUTGOING = 4  # PACKET_OUTGOING


@contextlib.contextmanager
def bad_wire(hosts: NetHosts, place: int, *, loss: float, delay_s: float) -> Iterator[None]:
    """Inside, everything to and from the host goes over such a wire."""
    outer, inner, plug = hosts.outer(place), f"{hosts.outer(place)}w", f"{hosts.outer(place)}x"
    call("ip", "link", "add", inner, "type", "veth", "peer", "name", plug)
    for name in (outer, inner, plug):
        _complete_packets(name)
    hosts.in_namespace(place, lambda: _complete_packets("eth0"))
    call("ip", "link", "set", outer, "nomaster")
    call("ip", "link", "set", plug, "master", hosts.bridge, "up")
    call("ip", "link", "set", inner, "up")
    stopped = threading.Event()
    ends = [_open(outer), _open(inner)]
    copier = threading.Thread(target=_copy, args=(ends, loss, delay_s, stopped), daemon=True)
    copier.start()
    try:
        yield
    finally:
        stopped.set()
        copier.join()
        for end in ends:
            end.close()
        call("ip", "link", "set", outer, "master", hosts.bridge)
        call("ip", "link", "del", inner)


def _copy(ends: list[socket.socket], loss: float, delay_s: float, stopped: threading.Event) -> None:
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    generator = random.Random(0)
    while not stopped.is_set():
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
        ready, _, _ = select.select(ends, [], [], min(wait_s, 0.1))
        for end in ready:
            frame, origin = end.recvfrom(_FRAME_BYTES)
            if origin[2] != _OUTGOING and generator.random() >= loss:
                waiting.append((time.monotonic() + delay_s, ends[1 - ends.index(end)], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, to, frame = waiting.popleft()
            with contextlib.suppress(OSError):
                to.send(frame)


def _open(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
    end.bind((name, 0))
    return end


def _complete_packets(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFF:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP", name.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):
                fcntl.ioctl(control, _SIOCETHTOOL, request + bytes(16))
