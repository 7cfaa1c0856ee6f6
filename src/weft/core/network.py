"""Names, addresses and interfaces of this host, from the kernel; without `ip`, and without a packet on the network.

    interface_to(address)   the interface on the route to an address: what GLOO_SOCKET_IFNAME should be

On systems other than Linux the functions of interfaces return nothing.
"""

from __future__ import annotations

import fcntl
import ipaddress
import queue
import socket
import struct
import threading
from pathlib import Path

_SIOCGIFADDR = 0x8915
_SIOCGIFFLAGS = 0x8913
_IS_UP = 0x1
_ANY_PORT = 9  # a datagram socket is connected to find the route; nothing is sent
_NAMED_BY = 15  # the kernel's limit on the length of an interface's name


def own_addresses() -> dict[str, str]:
    """Address to interface: IPv4 addresses of interfaces that are up, then global IPv6 ones; loopback last."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if (address := _ipv4_of(probe, name)) is not None:
                found[address] = name
    found |= _ipv6_addresses()
    return dict(sorted(found.items(), key=lambda item: is_loopback(item[0])))


def interface_to(address: str) -> str | None:
    """The interface of the route to an address or name; None if there is no route or the name is unknown."""
    local = _local_end(address)
    return own_addresses().get(local) if local is not None else None


def outward_interface() -> str | None:
    """The interface that other hosts see: of the default route, else the only one besides loopback."""
    for far_away in ("192.0.2.1", "2001:db8::1"):  # addresses for documentation: any route to them is the default one
        if (name := interface_to(far_away)) is not None:
            return name
    names = {name for address, name in own_addresses().items() if not is_loopback(address)}
    return next(iter(names)) if len(names) == 1 else None


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def resolve(name: str, *, timeout_s: float) -> str | None:
    """An address of the name; None if there is none, or the name service has not answered in time."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            answers.put(None)

    threading.Thread(target=ask, name="name-service", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _local_end(address: str) -> str | None:
    try:
        family, _, _, _, peer = socket.getaddrinfo(address, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _ipv4_of(probe: socket.socket, name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:_NAMED_BY])
    try:
        flags = struct.unpack("H", fcntl.ioctl(probe, _SIOCGIFFLAGS, request)[16:18])[0]
        address = fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]
    except OSError:  # no IPv4 address
        return None
    return socket.inet_ntoa(address) if flags & _IS_UP else None


def _ipv6_addresses() -> dict[str, str]:
    """From the kernel's table: addresses of scope global (00) and host (10)."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines]
    return {str(ipaddress.IPv6Address(int(row[0], 16))): row[5] for row in rows if row[3] in ("00", "10")}
