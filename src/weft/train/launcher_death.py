"""A rank ends with its launcher: no rank goes on writing into a run folder after its launcher was killed.

It does nothing for ranks that torchrun or Slurm started (they set no WEFT_LAUNCHER_PID).

    Linux: the kernel kills the child (PR_SET_PDEATHSIG); elsewhere a thread looks once a second
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import MutableMapping

from weft.train.rank_environment import LAUNCHER_VARIABLE

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0


def end_with_launcher(environment: MutableMapping[str, str]) -> None:
    """Arms the end of this process for the moment the launcher named in the environment is gone."""
    # Taken out, so that a rank's own child processes do not look for a parent that is not theirs.
    launcher = environment.pop(LAUNCHER_VARIABLE, None)
    if launcher is None:
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

    def watch() -> None:
        while not (os.getppid() != launcher_pid if is_parent else _is_gone(launcher_pid)):
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
