"""Servers and workers as child processes of the driver, which restarts dead ones.

A restarted server restores its folder, and so every acknowledged push; the units of a dead worker go to others at once.
Children have sessions of their own, so Ctrl-C reaches the driver alone; they end with the driver, however it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import ServerLostError, WorkerError
from weft.core.processes import signal_name
from weft.server.launchers import Launch, worker_name
from weft.server.main import TOKEN_VARIABLE
from weft.train.ranks.environment import LAUNCHER_VARIABLE

_END_S = 5.0


@dataclass
class _Child:
    role: str  # server | worker
    index: int
    name: str
    process: subprocess.Popen[bytes]
    log: Path


class ProcessLauncher:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._children: list[_Child] = []
        self._num_restarts = 0

    def start(self) -> None:
        spec = self._launch.run.server
        for role, count in (("server", spec.servers), ("worker", spec.workers)):
            self._children += [self._spawn(role, index) for index in range(count)]

    def look(self) -> None:
        for place, child in enumerate(self._children):
            code = child.process.poll()
            if code is None or (child.role == "worker" and code == 0):
                continue
            coordinator = self._launch.coordinator
            coordinator.lost(child.name) if child.role == "worker" else coordinator.forget_server(child.index)
            if coordinator.failure is not None:
                continue  # the driver ends the run with its report
            self._require_restart(child, code)
            self._children[place] = self._spawn(child.role, child.index)

    def stop(self) -> None:
        for role in ("worker", "server"):
            ending = [child.process for child in self._children if child.role == role]
            if role == "server":
                for process in ending:
                    process.terminate()
            for process in ending:
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _spawn(self, role: str, index: int) -> _Child:
        endpoint = self._launch.endpoint
        name = str(index) if role == "server" else worker_name(index)
        log = self._launch.logs / f"{role}-{index}.log"
        command = [sys.executable, "-m", "weft.server.main", role, endpoint.host, str(endpoint.port), name]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            TOKEN_VARIABLE: self._launch.token,
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        return _Child(role=role, index=index, name=name, process=process, log=log)

    def _require_restart(self, child: _Child, code: int) -> None:
        """A killed process is restarted. One that ended by itself, without a report, would end again."""
        kind = ServerLostError if child.role == "server" else WorkerError
        who, server = f"{child.role} {child.index}", self._launch.run.server
        if code >= 0:
            raise kind(f"{who} ended with exit code {code}: {_last_line(child.log)}", hint=f"see {child.log}")
        killed = f"{who} was killed by {signal_name(-code)}"
        if child.role == "worker" and self._launch.run.dense.place == "replicated":
            raise kind(
                f"{killed}, and replicated dense parameters need all workers",
                hint='dense.place = "servers" continues without it; --resume restarts from the last snapshot',
            )
        if child.role == "server" and server.durability == "none":
            # Units that it had and its last snapshot lacks would never be leased again: all workers would wait.
            raise kind(
                f"{killed}, and without a log its updates since its last snapshot are lost",
                hint='--resume continues from the last snapshot; server.durability = "process" survives this',
            )
        if self._num_restarts >= server.max_restarts:
            raise kind(
                f"{killed}, and {self._num_restarts} restarts are used up",
                hint="server.max_restarts allows more; --resume continues from here",
            )
        self._num_restarts += 1


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"
