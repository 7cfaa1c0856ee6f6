"""A lock file that names its owner; the owner updates its time while it holds the lock.

It works on a shared disk: an owner on this machine is checked by its process, any other by the file's heartbeat. The
file has a pid with the start time of its process. There is no lasting flock: a child process that outlives a killed
owner would keep the owner's flock, and several network file systems have none.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from weft.core.json_files import parse_json_table
from weft.core.processes import is_running, machine_id, start_of

HEARTBEAT_S = 5.0
STALE_S = 120.0  # network file systems may show an old time for a minute


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that holds a lock. `job` and `restart`: of torchrun or Slurm, which may restart a job."""

    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    machine: str = field(default_factory=machine_id)
    started: int = field(default_factory=lambda: start_of(os.getpid()))
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    job: str = ""
    restart: int = 0

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def to_json(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @property
    def is_here(self) -> bool:
        return self.machine == machine_id()

    @property
    def is_gone(self) -> bool:
        """Whether it ran on this machine and has ended."""
        return self.is_here and not is_running(self.pid, start=self.started)


class LockFile:
    """This process's hold on `path`, once `create` or `replace` succeeded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner: Owner | None = None
        self._ended = threading.Event()

    def create(self, owner: Owner) -> bool:
        """Take a free lock; False if the file exists."""
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(owner.to_json())
        except FileExistsError:
            return False
        self._hold(owner)
        return True

    def replace(self, draft: Path, owner: Owner) -> None:
        """Replace an abandoned lock by `draft`, which names `owner`."""
        draft.replace(self.path)
        self._hold(owner)

    def release(self) -> bool:
        """Remove the file unless another process took it over; False if this process never held it."""
        owner, self._owner = self._owner, None
        if owner is None:
            return False
        self._ended.set()
        found = read_owner(self.path)
        if found is not None and found.token == owner.token:
            with suppress(OSError):
                self.path.unlink()
        return True

    def _hold(self, owner: Owner) -> None:
        self._owner = owner
        threading.Thread(target=self._beat, name=f"heartbeat of {self.path.name}", daemon=True).start()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            with suppress(OSError):
                os.utime(self.path)


def read_owner(path: Path) -> Owner | None:
    """The owner that a lock names; None without a readable lock."""
    try:
        return parse_owner(path.read_bytes())
    except OSError:
        return None


def parse_owner(text: str | bytes) -> Owner | None:
    """The owner in a lock file's text; None if it is not, or not yet, a complete lock file."""
    try:
        return Owner(**parse_json_table(text))
    except (ValueError, TypeError):
        return None
