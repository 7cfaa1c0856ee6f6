"""Servers and workers as Ray actors: Ray places them, and restarts them when they die. No row passes through Ray.

The constructor of a server restores its folder, listens and registers, so Ray's restart is all it needs; on another
machine that folder must be shared. Ray calls `run` of a restarted worker again, and it joins under its old name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

from weft.core.errors import WorkerError
from weft.core.extras import import_extra
from weft.server.launchers import Launch, worker_name
from weft.server.wire.sockets import Endpoint

_GET_S = 5.0


class ServerActor:
    """A server; its rows go over a socket of its own."""

    def __init__(self, coordinator: tuple[str, int], token: str, index: int, is_local: bool) -> None:
        from weft.server.main import start_server

        self._server = start_server(Endpoint(*coordinator), token=token, index=index, host=_host(is_local=is_local))

    def pid(self) -> int:
        return os.getpid()


class WorkerActor:
    def __init__(self, coordinator: tuple[str, int], token: str, name: str) -> None:
        self._coordinator, self._token, self._name = Endpoint(*coordinator), token, name

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        import torch

        from weft.server.worker.worker import run_worker

        torch.set_num_threads(1)  # workers are the parallelism
        run_worker(self._coordinator, token=self._token, name=self._name)


def connect(address: str | None) -> str:
    """Joins a cluster, or starts one on this machine; returns the address of this process for the others."""
    ray = import_extra("ray")
    if not ray.is_initialized():
        if address is None:
            # Without it every daemon listens on the external address of the machine.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray.init(address=address, log_to_driver=False, logging_level="error")
    return _host(is_local=address is None)


def _host(*, is_local: bool) -> str:
    return "127.0.0.1" if is_local else str(import_extra("ray").util.get_node_ip_address())


class RayLauncher:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._ray = import_extra("ray")
        self._servers: list[Any] = []
        self._workers: list[Any] = []
        self._runs: dict[Any, str] = {}

    def start(self) -> None:
        from weft.server.launchers.ray import ServerActor, WorkerActor

        launch, ray = self._launch, self._ray
        endpoint = (launch.endpoint.host, launch.endpoint.port)
        is_local = launch.address is None
        restarts = {"max_restarts": -1, "max_task_retries": -1}
        # One per core, spread over the hosts: servers share the traffic, and a lost host takes few of them along.
        place = {"num_cpus": 0} if is_local else {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        job = hashlib.sha256(launch.token.encode()).hexdigest()[:8]  # a cluster may have several runs
        for index in range(launch.run.server.servers):
            options = {"name": f"weft/{job}/server/{index}", **restarts, **place}
            actor = ray.remote(ServerActor).options(**options)
            self._servers.append(actor.remote(endpoint, launch.token, index, is_local))
        for index in range(launch.run.server.workers):
            options = {"name": f"weft/{job}/worker/{index}", **restarts, **place}
            worker = ray.remote(WorkerActor).options(**options).remote(endpoint, launch.token, worker_name(index))
            self._workers.append(worker)
            self._runs[worker.run.remote()] = worker_name(index)

    def look(self) -> None:
        """Ray restarts dead actors; only errors that a restart does not mend are raised here."""
        ended, _ = self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=0) if self._runs else ([], [])
        for ref in ended:
            name = self._runs.pop(ref)
            try:
                self._ray.get(ref, timeout=_GET_S)
            except Exception as error:
                if self._launch.coordinator.failure is None:
                    raise WorkerError(f"{name}: {str(error).strip().splitlines()[-1]}") from None

    def stop(self) -> None:
        if self._runs:  # they end at their next request for a unit
            with contextlib.suppress(Exception):
                self._ray.wait(list(self._runs), num_returns=len(self._runs), timeout=_GET_S)
        for actor in [*self._workers, *self._servers]:
            self._ray.kill(actor)
