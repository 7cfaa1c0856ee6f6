"""The rendezvous address and the interface of a rank that other tools started (torchrun, srun, a script).

Two habits of hosts end in minutes of waiting or in Gloo's `connectFullMesh failed`: names that do not resolve, and
Debian's `127.0.1.1 hostname`, with which Gloo listens on loopback. Ranks of weft's launcher get both from it.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Mapping

from weft.core.errors import InputError
from weft.core.network import interface_to, is_loopback, outward_interface, resolve
from weft.train.ranks.environment import Rendezvous

SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_NAME_SERVICE_S = 3.0
_SCONTROL_S = 5.0


def with_known_address(rendezvous: Rendezvous, environment: Mapping[str, str]) -> Rendezvous:
    """The rendezvous with an address that resolves: of a Slurm node with an unknown name, the one that Slurm uses."""
    if resolve(rendezvous.address, timeout_s=_NAME_SERVICE_S) is not None:
        return rendezvous
    if "MASTER_ADDR" not in environment and (address := _slurm_address(rendezvous.address)) is not None:
        return dataclasses.replace(rendezvous, address=address)
    raise InputError(
        f"the address of rank 0's host, {rendezvous.address}, does not resolve on this host",
        hint="set MASTER_ADDR to an IP address of that host, or add the name to /etc/hosts or the name service",
    )


def socket_interface(rendezvous: Rendezvous, *, is_one_host: bool) -> str | None:
    """The interface for sockets between ranks: on the route to rank 0's host; None: unknown, the library chooses."""
    if sys.platform != "linux":
        return None
    name = interface_to(rendezvous.address)
    found = resolve(rendezvous.address, timeout_s=_NAME_SERVICE_S)
    is_name_of_loopback = is_loopback(found or "") and not is_loopback(rendezvous.address)
    if is_one_host or (name is not None and not is_name_of_loopback):
        return name
    return outward_interface()


def _slurm_address(node: str) -> str | None:
    """NodeAddr of a node, if it resolves."""
    try:
        command = ["scontrol", "show", "node", node, "--oneliner"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bNodeAddr=(\S+)", shown)
    if match is None or resolve(match[1], timeout_s=_NAME_SERVICE_S) is None:
        return None
    return match[1]
