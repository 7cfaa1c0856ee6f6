"""Processes of this machine, from /proc: parent, state, whether one is still running.

    pid + start time + machine identify a process: a pid alone may have been reused

Without /proc the functions return None, 0 or "".
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from weft.core.cgroup import cpu_quota

_STATES = {
    "R": "it is running (state R)",
    "S": "it is waiting (state S)",
    "D": "it is waiting for a disk or device (state D)",
    "T": "it is stopped (state T)",
    "t": "it is stopped by a debugger (state t)",
    "Z": "it has ended",
    "X": "it has ended",
}


def state_of(pid: int) -> str | None:
    """The kernel's letter: R, S, D, T (stopped), t (traced), Z (ended); None for a process that does not exist."""
    fields = _stat(pid)
    return fields[0] if fields else None


def parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def start_of(pid: int) -> int:
    """Start time of the process in kernel ticks; 0 if unknown."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int, *, start: int) -> bool:
    """Whether the process that started at `start` is running; a zombie is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    now = start_of(pid)
    return state_of(pid) not in ("Z", "X") and (not now or not start or now == start)


def machine_id() -> str:
    """The scope of a pid: the boot of the kernel and the pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def describe_process(pid: int, *, start: int) -> str:
    """The state of the process as a clause; "" without /proc."""
    if not start or not Path("/proc/self/stat").exists():
        return ""
    if start_of(pid) != start:
        return "it has ended"
    return _STATES.get(state_of(pid) or "", "")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the name, which may contain blanks and brackets: state is the first."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def num_cores() -> int:
    """Cores that this process may use: in a container fewer than the machine has, by affinity or by a quota of time."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return visible if quota is None else max(1, min(visible, int(quota)))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
