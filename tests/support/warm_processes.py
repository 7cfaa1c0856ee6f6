"""Makes the ranks, dry runs and servers that this process starts forks of it, which have imported what it has.

    fork_modules()    from now on `subprocess.Popen` forks for `python -m weft.train ...` and the like, and processes
                      that would be spawned are forked

A rank that imports torch and transformers by itself takes five seconds of a core. Only for a process without Python
threads of its own at the time of the fork. The commands' arguments, environment, folder, session, output, exit codes
and signals are those of a started process.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import traceback
from typing import Any, NoReturn

_START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = tuple(inspect.signature(_START).parameters)
_MODULES = ("weft.train", "weft.verify", "weft.launch.warm_server", "weft.dryrun", "weft.server.main")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fork_modules() -> None:
    subprocess.Popen._execute_child = _fork_or_start  # type: ignore[attr-defined]
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)


def _fork_or_start(process: Any, *args: Any) -> None:
    given = dict(zip(_PARAMETERS, (process, *args), strict=True))
    command = list(map(str, given["args"])) if not isinstance(given["args"], str | bytes) else []
    if command[:2] != [sys.executable, "-m"] or command[2] not in _MODULES:
        _START(process, *args)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process.pid = os.fork()
    if process.pid == 0:
        _become(given, command)
    process._child_created = True
    process._close_pipe_fds(*(given[name] for name in _PARAMETERS if name.endswith(("read", "write"))))


def _become(given: dict[str, Any], command: list[str]) -> NoReturn:
    if given["start_new_session"]:
        os.setsid()
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    for name, number in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
        if given[name] != -1:
            os.dup2(given[name], number)
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
    _run_module(command[2], command[3:])


def _run_module(name: str, args: list[str]) -> NoReturn:
    code = 1
    try:
        sys.argv = [name, *args]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
