"""`HostsRequest`: a launch on several hosts, as a value."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weft.launch.host_list import Host

# A lost host's ranks must end within 10 s of its launcher's death or a cut link: the lease, and a second to kill them.
LEASE_S = 8.0


@dataclass(frozen=True, kw_only=True)
class HostsRequest:
    """`command`: a verb of weft with its arguments, which every rank runs. `folder`: the run folder, for the logs.

    `min_hosts`: restarts may use fewer hosts, at least so many; None: all. `fit`: the largest usable number of ranks
    that is not above a given one (0: none), for plans that cannot use any number.
    """

    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    folder: Path | None = None
    ssh: tuple[str, ...] = ("ssh",)
    ssh_options: tuple[str, ...] = ()
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)  # of all ranks, besides what this process has
    program: tuple[str, ...] = ("-m", "weft")  # what this Python runs with `command`
    imports: tuple[str, ...] = ()  # modules that ranks of `python -m` need: imported once per host
    directory: str = field(default_factory=os.getcwd)
    connect_timeout_s: float = 60.0
    lease_s: float = LEASE_S
    max_restarts: int = 0
    min_hosts: int | None = None
    fit: Callable[[int], int] | None = None
