"""The address at which the ranks of all hosts reach the first one: found by connecting, not by names.

The first host listens, every other host tries its addresses. A name may resolve to loopback on its own host (Debian's
`127.0.1.1 hostname`), to nothing, or to a network that the others do not have; a connection proves the address.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence

from weft.core.network import own_addresses

_PROBE_S = 3.0
_TOKEN_BYTES = 16


def addresses_to_offer() -> dict[str, str]:
    """Address to interface, in the order to try: the one that ssh reached, then others, loopback last."""
    own = own_addresses()
    reached = os.environ.get("SSH_CONNECTION", "").split()
    if len(reached) == 4 and reached[2] in own:
        return {reached[2]: own[reached[2]], **own}
    return own


class MeetingPoint:
    """Answers every connection with a token, by which a host knows that it has reached this one."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self._socket = _open_listener()
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._answer, name="meeting", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.sendall(self.token.encode())


def reach(addresses: Iterable[str], *, port: int, token: str) -> dict[str, str]:
    """For each address that leads to the listener: the address of this host's end of the connection."""
    found: dict[str, str] = {}

    def try_one(address: str) -> None:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=_PROBE_S) as connection:
            local = str(connection.getsockname()[0])
            if connection.recv(len(token), socket.MSG_WAITALL).decode(errors="replace") == token:
                found[address] = local

    threads = [threading.Thread(target=try_one, args=(address,), daemon=True) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PROBE_S)
    return dict(found)


def choose_address(offered: Sequence[str], reached: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first offered address that every host has reached."""
    return next((address for address in offered if all(address in found for found in reached.values())), None)


def _open_listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
