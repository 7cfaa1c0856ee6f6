"""Servers and workers as children of the driver. It looks at them often and starts again what died.

A server that died comes back with its folder, and so with every acknowledged push; a worker's units go to others at
once. Children have sessions of their own, so Ctrl-C reaches the driver alone, and end with it, however it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import ServerLostError, WorkerError
from weft.server.launchers import Launch, worker_name
from weft.server.main import TOKEN_VARIABLE
from weft.train.rank_environment import LAUNCHER_VARIABLE

_END_S = 5.0


@dataclass
class _Child:
    role: str  # server | worker
    index: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def name(self) -> str:
        return str(self.index) if self.role == "server" else worker_name(self.index)


class ProcessLauncher:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._children: list[_Child] = []
        self._num_restarts = 0

    @property
    def pids(self) -> dict[str, int]:
        return {f"{child.role} {child.index}": child.process.pid for child in self._children}

    def start(self) -> None:
        spec = self._launch.spec
        roles = [("server", index) for index in range(spec.servers)] + [
            ("worker", index) for index in range(spec.workers)
        ]
        for role, index in roles:
            self._children.append(self._spawn(role, index))

    def look(self) -> None:
        for place, child in enumerate(self._children):
            code = child.process.poll()
            if code is None or (child.role == "worker" and code == 0):
                continue
            self._tell(child)
            if self._launch.coordinator.failure is not None:
                continue  # it said why; the driver ends the run with that
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
        return _Child(role=role, index=index, process=process, log=log)

    def _tell(self, child: _Child) -> None:
        if child.role == "worker":
            self._launch.coordinator.lost(child.name)
        else:
            self._launch.coordinator.forget_server(child.index)

    def _require_restart(self, child: _Child, code: int) -> None:
        """Killed from outside: it may come back. Ended by itself, without a word to the coordinator: it will again."""
        kind = ServerLostError if child.role == "server" else WorkerError
        who = f"{child.role} {child.index}"
        if code >= 0:
            raise kind(f"{who} ended with exit code {code}: {_last_line(child.log)}", hint=f"see {child.log}")
        if child.role == "worker" and self._launch.needs_all_workers:
            raise kind(
                f"{who} was killed by {signal.Signals(-code).name}, and replicated dense parameters need all workers",
                hint='dense.place = "servers" goes on without it; --resume starts again from the last snapshot',
            )
        if child.role == "server" and self._launch.spec.durability == "none":
            # Units that it had and its last snapshot has not would never be leased again: everybody would wait.
            raise kind(
                f"{who} was killed by {signal.Signals(-code).name}, and without a log what it learnt since its last"
                " snapshot is gone",
                hint='--resume goes on from the last snapshot; server.durability = "process" survives this',
            )
        if self._num_restarts >= self._launch.spec.max_restarts:
            raise kind(
                f"{who} was killed by {signal.Signals(-code).name}, and {self._num_restarts} restarts are used up",
                hint="server.max_restarts allows more; --resume goes on from here",
            )
        self._num_restarts += 1


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
