"""The ranks' key-value store, which listens only on the given address.

`weft.train.ranks.process` builds the process group on top of it.

    TCPStore(host, port) alone listens on every interface; a socket bound beforehand does not
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.core.errors import InputError
from weft.train.ranks.environment import Process, Rendezvous

_BACKLOG = 2048


def open_store(rendezvous: Rendezvous | None, *, process: Process, timeout_s: float) -> Store:
    """This rank's client of the store, with separate keys per restart.

    torchrun keeps one store over restarts: a restarted rank that read addresses of dead ranks would get
    "connection refused", or wait for the full timeout.
    """
    store = _open(rendezvous, rank=process.rank, timeout_s=timeout_s)
    return PrefixStore(f"generation-{process.restart_count}", store)


def _open(rendezvous: Rendezvous | None, *, rank: int, timeout_s: float) -> Store:
    if rendezvous is None:
        return HashStore()
    if rank == 0 and not rendezvous.served_by_agent:
        return _serve(rendezvous, timeout_s=timeout_s)
    return TCPStore(rendezvous.address, rendezvous.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def serve_store(address: str, *, port: int = 0, timeout_s: float) -> TCPStore:
    """A store that listens on this one IP address; port 0 takes a free one."""
    listener = _listen(address, port)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _serve(rendezvous: Rendezvous, *, timeout_s: float) -> TCPStore:
    if (address := _literal(rendezvous.address)) is not None:
        return serve_store(address, port=rendezvous.port, timeout_s=timeout_s)
    # A host name often resolves to 127.0.1.1 on its own host; bound there, no other host could connect.
    return TCPStore(
        rendezvous.address,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )


def _literal(address: str) -> str | None:
    if address == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return None


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A restarted job may reuse the port while old connections linger.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(
            f"Rank 0 cannot listen on {address}:{port}: {error.strerror}.",
            hint="MASTER_ADDR must be an address of rank 0's host, MASTER_PORT a free port there",
        ) from error
    return listener
