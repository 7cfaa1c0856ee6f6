"""Servers and workers as Ray actors: Ray places them, and starts them again when they die. No row passes through Ray.

A server's constructor restores its folder, listens and registers, so Ray's restart is all it needs; on another machine
that folder must be shared. A worker's `run` is asked again by Ray after a restart, and joins under its old name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

from weft.core.errors import WorkerError
from weft.core.extras import missing_extra
from weft.server.launchers import Launch, worker_name

_GET_S = 5.0


def connect(address: str | None) -> str:
    """Joins a cluster, or starts one on this machine alone; returns the address that others reach this process by."""
    ray = import_ray()
    if not ray.is_initialized():
        if address is None:
            # Without it every daemon listens on the machine's outward address.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    return "127.0.0.1" if address is None else str(ray.util.get_node_ip_address())


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing_extra("ray") from None
    return ray


class RayLauncher:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._ray = import_ray()
        self._servers: list[Any] = []
        self._workers: list[Any] = []
        self._runs: dict[Any, str] = {}

    def start(self) -> None:
        from weft.server.launchers.ray_actors import ServerActor, WorkerActor

        launch, ray = self._launch, self._ray
        endpoint = (launch.endpoint.host, launch.endpoint.port)
        is_local = launch.address is None
        restarts = {"max_restarts": -1, "max_task_retries": -1}
        # One a core, and host by host in turn: servers share the traffic, and a lost host takes few of them along.
        place = {"num_cpus": 0} if is_local else {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        job = hashlib.sha256(launch.token.encode()).hexdigest()[:8]  # a cluster may have several runs
        for index in range(launch.spec.servers):
            options = {"name": f"weft/{job}/server/{index}", **restarts, **place}
            actor = ray.remote(ServerActor).options(**options)
            self._servers.append(actor.remote(endpoint, launch.token, index, is_local))
        for index in range(launch.spec.workers):
            options = {"name": f"weft/{job}/worker/{index}", **restarts, **place}
            worker = ray.remote(WorkerActor).options(**options).remote(endpoint, launch.token, worker_name(index))
            self._workers.append(worker)
            self._runs[worker.run.remote()] = worker_name(index)

    def look(self) -> None:
        """Ray restarts what died; here only errors that will not go away are looked for."""
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        for ref in ended:
            name = self._runs.pop(ref)
            try:
                self._ray.get(ref, timeout=_GET_S)
            except Exception as error:
                if self._launch.coordinator.failure is None:
                    raise WorkerError(f"{name}: {str(error).strip().splitlines()[-1]}") from None

    def stop(self) -> None:
        if self._runs:  # they are told the end when they ask for the next unit
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_GET_S)
        for actor in [*self._workers, *self._servers]:
            self._ray.kill(actor)
