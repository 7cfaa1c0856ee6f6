"""The lock of a run folder: one run at a time writes into it, and `run.lock` says whose it is.

    the owner runs on this machine                               -> refused
    the owner is gone, or its pid is another process's by now    -> taken over
    an earlier start of the same torchrun or Slurm job           -> taken over
    the owner is on another machine, or in another container     -> refused until its heartbeat is STALE_S old

A pid with the start time of its process, and no flock that lasts: a child process that outlives a killed owner would
keep the owner's flock, and several network file systems have none. A flock of the folder orders processes that look
at the same moment; where there is none, the exclusive creation of the file still lets only one of them in.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.core.errors import FolderBusyError, RunFolderError
from weft.core.json_files import parse_json_table
from weft.train.rank_environment import read_process

LOCK_NAME = "run.lock"
HEARTBEAT_S = 15.0
STALE_S = 120.0  # above the minute for which a network file system may show an old time


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that writes into a folder."""

    pid: int
    host: str
    machine: str  # of whom the pid means something: a boot of a kernel, and a namespace of pids
    started: int | None  # of the process, in the kernel's ticks: a pid alone may come back
    since: str
    job: str = ""  # of torchrun or Slurm, which start the ranks of a job again
    restart: int = 0
    token: str = ""

    @staticmethod
    def here(environment: Mapping[str, str]) -> Owner:
        return Owner(
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=_machine(),
            started=_started(os.getpid()),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            job=_job(environment),
            restart=read_process(environment).restart_count,
            token=secrets.token_hex(8),
        )

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class FolderLock:
    """Taken with `acquire`, left with the `with` block; a heartbeat in between."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._owner: Owner | None = None
        self._made_folder = False
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> str:
        """Take the lock, with the folder where there is none; returns what to say about an earlier owner."""
        owner = Owner.here(os.environ)
        try:
            self._made_folder = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self.path.parent):
                note = self._write(owner)
        except OSError as error:
            self._remove_folder()
            raise RunFolderError(
                f"the run folder {self.path.parent} cannot be written: {error}", hint="choose another --out"
            ) from None
        self._owner = owner
        threading.Thread(target=self._beat, name="folder-lock", daemon=True).start()
        return note

    def release(self) -> None:
        """Give the folder free, and remove it where nothing was written into it; nothing where it was not acquired."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._ended.set()
        found = read_owner(self.path)
        if found is not None and found.token == owner.token:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._remove_folder()

    @contextlib.contextmanager
    def released_by_failure(self) -> Iterator[None]:
        """Inside `report_failures`, which ends the process at once."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _write(self, owner: Owner) -> str:
        text = json.dumps(asdict(owner)) + "\n"
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(text)
            return ""
        except FileExistsError:
            draft = self.path.with_name(f".{LOCK_NAME}-{owner.token}")
            try:
                draft.write_text(text, encoding="utf-8")
                # The file system's own clock: that of another machine may differ from ours.
                note = self._require_abandoned(owner, now_s=draft.stat().st_mtime)
                draft.replace(self.path)
            finally:
                draft.unlink(missing_ok=True)
            return note

    def _require_abandoned(self, owner: Owner, *, now_s: float) -> str:
        found = read_owner(self.path)
        age_s = now_s - self.path.stat().st_mtime
        why = _why_abandoned(found, owner, age_s=age_s)
        if why:
            return f"the lock of {found or 'an unknown process'} was taken over: {why}"
        folder = self.path.parent
        raise FolderBusyError(
            f"{found or 'another process'} is training into {folder}" + (f" since {found.since}" if found else ""),
            hint=f"wait for it, stop it, or choose another folder; if it is no longer running, remove {self.path}",
        )

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def _remove_folder(self) -> None:
        if self._made_folder:
            with contextlib.suppress(OSError):  # it is in use by now, as it should be
                self.path.parent.rmdir()


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock names; None where there is none, or one that cannot be read."""
    try:
        return Owner(**parse_json_table(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _why_abandoned(found: Owner | None, owner: Owner, *, age_s: float) -> str:
    """Why the lock is nobody's any more; empty where it is somebody's, or may be."""
    if found is not None and found.machine == owner.machine:
        return "" if _is_running(found) else "that process is gone"
    if found is not None and found.job and found.job == owner.job and owner.restart > found.restart:
        return "it was an earlier start of this job"
    return f"no sign of life for {age_s:.0f} s" if age_s > STALE_S else ""


def _is_running(owner: Owner) -> bool:
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    started = _started(owner.pid)
    return started is None or owner.started is None or started == owner.started


def _started(pid: int) -> int | None:
    """When the process began, in ticks since the kernel did; -1 for one that ended and was not waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # not Linux, or hidden from us
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _job(environment: Mapping[str, str]) -> str:
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # torchrun's name for a job that nobody named
        return f"torchrun {run}"
    slurm = environment.get("SLURM_JOB_ID", "")
    return f"slurm {slurm}" if slurm else ""


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
