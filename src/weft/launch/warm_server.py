"""A fork server: it imports libraries once, then forks a process per rank, so that no rank pays for imports.

    python -m weft.launch.warm_server FD MODULE...        FD: a socket to the launcher, lines of JSON

    launcher -> server   {"arguments": [module, argument...], "variables": {...}, "streams": [...]}   one line per rank
    server -> launcher   {"unfit": why or ""}, then per rank {"started": pid}, and {"ended": pid, "code": exit code}

Forked ranks share the memory of what was imported until they write to it. A fork is right only while this process has
one thread and no device: both are checked after the imports, and ranks are started without it otherwise. Spare
interpreters that wait with their imports done would need neither rule, but import once per rank and restart, on
cores that the ranks use.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.quiet import quiet_libraries
from weft.train.ranks.environment import LAUNCHER_VARIABLE
from weft.train.ranks.launcher_death import end_with_launcher, end_with_parent

_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """What a forked process runs: `python -m arguments...` in an environment. `streams`: files for stdout and stderr,
    or nothing."""

    arguments: list[str]
    variables: dict[str, str]
    streams: list[str]


def main() -> None:
    channel, modules = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    end_with_launcher(os.environ)
    request = serve(channel, modules)
    _run(request)


def serve(channel: socket.socket, modules: Sequence[str]) -> RankRequest:
    """Fork as the launcher asks. Returns in the forked processes only; ends this one with the launcher's socket."""
    unfit = _prepare(modules)
    _send(channel, {"unfit": unfit})
    if unfit:
        sys.exit(0)
    awake, alarm = _wake_on_child()
    pending = b""
    while True:
        ready, _, _ = select.select([channel.fileno(), awake], [], [])
        if awake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(awake, _CHUNK_BYTES)
            _report_ends(channel)
        if channel.fileno() not in ready:
            continue
        data = channel.recv(_CHUNK_BYTES)
        if not data:  # the launcher has ended its job or itself; the kernel ends ranks that are left
            os._exit(0)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = RankRequest(**json.loads(line))
            request.variables[LAUNCHER_VARIABLE] = str(os.getpid())  # the ranks end with this process
            pid = _fork(channel, awake, alarm)
            if pid == 0:
                return request
            _send(channel, {"started": pid})


def why_unfit(root: Path = Path("/proc/self")) -> str:
    """Why this process must not fork, or "". A lock that another thread holds stays locked in the child; a device that
    is open is not usable there."""
    num_threads = len(list((root / "task").iterdir()))
    if num_threads > 1:
        return f"the imports started {num_threads - 1} threads"
    for link in (root / "fd").iterdir():
        with contextlib.suppress(OSError):
            if (target := os.readlink(link)).startswith(_DEVICES):
                return f"the imports opened {target}"
    return ""


def _prepare(modules: Sequence[str]) -> str:
    quiet_libraries()
    try:
        for name in modules:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
    except Exception as error:  # the rank that imports it will report it
        return f"{name} could not be imported: {error}"
    gc.collect()
    gc.freeze()  # a collection in a rank would write to, and so copy, every shared page
    return why_unfit()


def _wake_on_child() -> tuple[int, int]:
    """Both ends of a pipe: a child that ends makes the first one readable."""
    awake, alarm = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(alarm, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return awake, alarm


def _fork(channel: socket.socket, *pipe: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of libraries that register hooks
        pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        for end in pipe:
            os.close(end)
        os.setsid()
    return pid


def _report_ends(channel: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            _send(channel, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the launcher has ended: recv says so too
        channel.sendall(json.dumps(message).encode() + b"\n")


def _run(request: RankRequest) -> None:
    os.environ.clear()
    os.environ.update(request.variables)
    end_with_parent(int(request.variables[LAUNCHER_VARIABLE]))
    for number, path in enumerate(request.streams, start=1):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = list(request.arguments)
    runpy.run_module(request.arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
