"""End a rank with its launcher: no rank keeps writing into a run folder after its launcher was killed.

The launcher is weft's own (it sets WEFT_LAUNCHER_PID) or torchrun's agent. Ranks of Slurm or of a script are not
watched: there a parent may legitimately end before its ranks.

    weft's launcher on Linux: the kernel kills the child (PR_SET_PDEATHSIG); otherwise a thread polls once per second
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping

from weft.core.processes import parent_of
from weft.train.ranks.environment import LAUNCHER_VARIABLE, is_torchrun_rank

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def end_with_launcher(environment: MutableMapping[str, str]) -> None:
    """Arrange that this process ends when its launcher has ended."""
    # Removed, so that child processes of a rank do not watch a launcher that is not their parent.
    launcher = environment.pop(LAUNCHER_VARIABLE, None)
    if launcher is None:
        _end_with_torchrun(environment)
        return
    launcher_pid = int(launcher)
    if sys.platform == "linux" and os.getppid() == launcher_pid:
        end_with_parent(launcher_pid)
        return
    watch_launcher(launcher_pid)


def end_with_parent(parent_pid: int) -> None:
    """Let the kernel (Linux) kill this process when the thread that started it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the call, so no signal will come
        _end()


def watch_launcher(launcher_pid: int) -> None:
    """Poll the launcher: on other systems, and for a rank inside a wrapper process (a profiler, for example)."""
    is_parent = os.getppid() == launcher_pid
    _end_when(lambda: os.getppid() != launcher_pid if is_parent else _is_gone(launcher_pid))


def _end_with_torchrun(environment: Mapping[str, str]) -> None:
    """Poll the agent. The kernel's signal comes when the parent *thread* ends, and an agent may start ranks from any
    thread."""
    if not is_torchrun_rank(environment):
        return
    # torchrun starts a session leader: the rank itself, or a wrapper (a shell, a profiler) around it.
    leader = os.getsid(0)
    if leader == os.getpid():
        agent = os.getppid()
        _end_when(lambda: os.getppid() != agent)
    elif (agent_of_leader := parent_of(leader)) is not None:
        _end_when(lambda: parent_of(leader) != agent_of_leader)


def _end_when(is_over: Callable[[], bool]) -> None:
    def watch() -> None:
        while not is_over():
            time.sleep(_POLL_S)
        _end()

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
