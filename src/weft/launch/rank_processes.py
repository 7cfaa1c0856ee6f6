"""Processes of ranks: started by a command, or forked by a warm process that has imported everything already.

`warm_server` is the other side. Without it, or when it is unfit, every rank starts by its command.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from weft.launch.rank_variables import rank_variables

_MODULE = "weft.launch.warm_server"
_GPU_DRIVERS = ("nvidiactl", "kfd")
_POLL_S = 0.1
_CHUNK_BYTES = 1 << 16
Variables = Mapping[str, str]
Streams = tuple[Path, Path]  # files for stdout and stderr


class RankProcess(Protocol):
    """The part of `subprocess.Popen` that the agent uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a GPU's driver. A library that looks for GPUs at its import spoils them for forks."""
    return any((devices / name).exists() for name in _GPU_DRIVERS)


def start_cold(command: Sequence[str], variables: Variables, *, streams: Streams | None = None) -> RankProcess:
    """A process for the command, the leader of a session, so that its own children end with it."""
    environment = {**os.environ, **variables}
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context(path.open("wb")) for path in streams) if streams else (None, None)
        return subprocess.Popen(list(command), env=environment, start_new_session=True, stdout=out, stderr=err)


def warm_ranks(
    imports: Sequence[str], *, scratch: Path, num_ranks: int, interface: str | None = "lo"
) -> WarmRanks | None:
    """A process that imports the modules, to fork ranks from; None where that is not possible.

    System libraries of other platforms do not survive a fork; on a machine with GPUs forks are not tested.
    """
    if not imports or sys.platform != "linux" or has_gpu():
        return None
    variables = rank_variables(
        scratch=scratch, num_ranks=num_ranks, given=os.environ, platform=sys.platform, interface=interface
    )
    return WarmRanks(imports, variables=variables)


class WarmRanks:
    """The launcher's side of the fork server. `modules` are imported there; `variables` must be set before."""

    def __init__(self, modules: Sequence[str], *, variables: Variables) -> None:
        self._channel, theirs = socket.socketpair()
        self._pending = b""
        self._codes: dict[int, int] = {}  # exit codes by pid
        self._started: list[int] = []  # pids that no caller has taken yet
        self.unfit: str | None = None  # why it cannot fork; None while it imports, "" when it can
        # numpy's BLAS starts threads at its import, unless it may have one only.
        environment = {**os.environ, **variables, "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(theirs.fileno()), *modules],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def wait_until_ready(self, should_stop: Callable[[], bool]) -> None:
        while self.unfit is None and not should_stop():
            self._receive(timeout_s=_POLL_S)

    def start(
        self, arguments: Sequence[str], variables: Variables, *, streams: Streams | None = None
    ) -> RankProcess | None:
        """A forked process that runs `python -m arguments...`; None if the server cannot, or still imports."""
        if self.unfit != "":
            return None
        files = [str(path) for path in streams or ()]
        request = {"arguments": list(arguments), "variables": {**os.environ, **variables}, "streams": files}
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            self._lose()
        while not self._started and not self.unfit:
            self._receive(timeout_s=_POLL_S)
        return WarmRank(self._started.pop(0), self) if self._started else None

    def code_of(self, pid: int) -> int | None:
        self._receive(timeout_s=0.0)
        if pid not in self._codes and self.unfit:
            return -9  # it died with the server
        return self._codes.get(pid)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the server has ended
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        if self.unfit is None:  # it still imports, and would read the end of the socket only after that
            self._server.kill()
        self._server.wait()

    def _receive(self, *, timeout_s: float) -> None:
        while not self.unfit and select.select([self._channel], [], [], timeout_s)[0]:
            data = b""
            with contextlib.suppress(OSError):
                data = self._channel.recv(_CHUNK_BYTES)
            if not data:
                self._lose()
                return
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                self._note(json.loads(line))
            timeout_s = 0.0

    def _note(self, message: dict[str, Any]) -> None:
        if "unfit" in message:
            self.unfit = message["unfit"]
        elif "started" in message:
            self._started.append(message["started"])
        else:
            self._codes[message["ended"]] = message["code"]

    def _lose(self) -> None:
        self.unfit = self.unfit or "the process that forks ranks has ended"


class WarmRank:
    """A forked rank; a child of the server, which reports its end."""

    def __init__(self, pid: int, server: WarmRanks) -> None:
        self.pid, self._server = pid, server

    def poll(self) -> int | None:
        return self._server.code_of(self.pid)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_POLL_S / 10)
        return code
