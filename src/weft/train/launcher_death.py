"""A rank ends with its launcher: no rank goes on writing into a run folder after its launcher was killed.

The launcher is our own (it sets WEFT_LAUNCHER_PID) or torchrun's agent. Ranks of Slurm or of a script are left alone:
there a parent may end before its ranks, and means no harm.

    our own launcher on Linux: the kernel kills the child (PR_SET_PDEATHSIG); else a thread looks once a second
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
from weft.train.rank_environment import LAUNCHER_VARIABLE, is_torchrun_rank

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def end_with_launcher(environment: MutableMapping[str, str]) -> None:
    """Arms the end of this process for the moment its launcher is gone."""
    # Taken out, so that a rank's own child processes do not look for a parent that is not theirs.
    launcher = environment.pop(LAUNCHER_VARIABLE, None)
    if launcher is None:
        _end_with_torchrun(environment)
        return
    launcher_pid = int(launcher)
    if sys.platform == "linux" and os.getppid() == launcher_pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher_pid:  # it died between the first look and the call, so no signal will come
            _end()
        return
    watch_launcher(launcher_pid)


def watch_launcher(launcher_pid: int) -> None:
    """The portable way, and the way for a rank that runs inside a wrapper process (a profiler, say)."""
    is_parent = os.getppid() == launcher_pid
    _end_when(lambda: os.getppid() != launcher_pid if is_parent else _is_gone(launcher_pid))


def _end_with_torchrun(environment: Mapping[str, str]) -> None:
    """By a thread and not by the kernel, whose signal comes when the parent's *thread* ends: an agent may start its
    ranks from any."""
    if not is_torchrun_rank(environment):
        return
    # torchrun makes what it starts the leader of a session: the rank, or a wrapper (a shell, a profiler) around it.
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
