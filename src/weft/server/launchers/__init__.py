"""Three ways to start the servers and workers of a run; what runs inside is the same code.

in_process   threads of the driver: tests, small runs
processes    children of the driver, supervised by it: one machine
ray          actors, supervised by Ray: many machines
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weft.core.server_spec import ServerSpec
from weft.server.coordinator import Coordinator
from weft.server.task import Build
from weft.server.wire.endpoint import Endpoint


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What a launcher needs to know."""

    spec: ServerSpec
    coordinator: Coordinator
    endpoint: Endpoint  # where the coordinator listens
    token: str
    logs: Path  # a file for each child
    needs_all_workers: bool = False  # nobody can take a dead worker's place
    build: Build | None = None  # of in_process alone: another process cannot be given a function
    address: str | None = None  # of a Ray cluster


class Launcher(Protocol):
    def start(self) -> None:
        """Starts servers and workers; they come to the coordinator by themselves."""

    def look(self) -> None:
        """Called often: starts again what died, or raises when that was too often."""

    def stop(self) -> None:
        """Ends everything; nothing is left running."""


def worker_name(index: int) -> str:
    return f"worker {index}"


def open_launcher(launch: Launch) -> Launcher:
    if launch.spec.launcher == "ray":
        from weft.server.launchers.ray import RayLauncher

        return RayLauncher(launch)
    if launch.spec.launcher == "processes":
        from weft.server.launchers.processes import ProcessLauncher

        return ProcessLauncher(launch)
    from weft.server.launchers.in_process import InProcessLauncher

    return InProcessLauncher(launch)
