"""Servers and workers as threads of the driver, over the same sockets: for tests and small runs."""

from __future__ import annotations

import contextlib
import threading

from weft.server.launchers import Launch, worker_name
from weft.server.main import start_server
from weft.server.node.server import Server
from weft.server.worker.worker import run_worker

_JOIN_S = 10.0


class InProcessLauncher:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._servers: list[Server] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        launch = self._launch
        for index in range(launch.run.server.servers):
            self._servers.append(start_server(launch.endpoint, token=launch.token, index=index))
        for index in range(launch.run.server.workers):
            thread = threading.Thread(target=self._work, args=(worker_name(index),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def look(self) -> None:
        return  # a thread reports its error to the coordinator, and is never killed

    def stop(self) -> None:
        for thread in self._threads:  # they end at their next request for a unit
            thread.join(_JOIN_S)
        for server in self._servers:
            server.stop()

    def _work(self, name: str) -> None:
        launch = self._launch
        with contextlib.suppress(Exception):  # reported to the coordinator
            run_worker(launch.endpoint, token=launch.token, name=name, build=launch.build, is_thread=True)
