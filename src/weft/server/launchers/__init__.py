"""Three ways to start the servers and workers of a run, which run the same code.

in_process   threads of the driver: tests, small runs
processes    children of the driver, supervised by it: one machine
ray          actors, supervised by Ray: many machines
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weft.core.server_spec import ServerRun
from weft.server.job.coordinator import Coordinator
from weft.server.model.task import Build
from weft.server.wire.sockets import Endpoint


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The inputs of a launcher."""

    run: ServerRun
    coordinator: Coordinator
    endpoint: Endpoint  # where the coordinator listens
    token: str
    logs: Path  # a file for each child
    build: Build | None = None  # for in_process only: other processes cannot be given a function
    address: str | None = None  # of a Ray cluster


class Launcher(Protocol):
    def start(self) -> None:
        """Starts servers and workers, which then connect to the coordinator."""

    def look(self) -> None:
        """Called often: restarts dead processes, or raises when the restarts are used up."""

    def stop(self) -> None:
        """Ends all servers and workers."""


def worker_name(index: int) -> str:
    return f"worker {index}"
