"""A lock file with its owner in it, for work that several processes would otherwise do twice, on a shared disk too.

It is not needed for correctness: whoever holds it may lose it, and what it guards is committed by a rename.
Who waits judges the owner: dead at once when it ran on this machine and is gone; else when the file, which a living
owner touches every few seconds, stayed the same for STALE_AFTER_S of the waiting process's own clock.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEAT_S = 5.0
# Beyond the minute for which network file systems may show an old time of a file.
STALE_AFTER_S = 120.0


@dataclass(frozen=True)
class _Seen:
    """A lock file as it was found, and when."""

    text: str
    beat_ns: int
    since_s: float


class BuildLock:
    """One process's view of the lock `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = uuid.uuid4().hex
        self._seen: _Seen | None = None
        self._ended = threading.Event()

    def acquire(self) -> bool:
        """Take the lock if it is free or its owner is dead; never waits."""
        if self._create():
            threading.Thread(target=self._beat, name="build-lock", daemon=True).start()
            return True
        if self._is_abandoned():
            self._break()
        return False

    def release(self) -> None:
        self._ended.set()
        if self._mark in _read(self._path)[0]:  # not one that somebody took over
            self._path.unlink(missing_ok=True)

    def owner(self) -> str:
        """For people: who holds it."""
        fields = _fields(_read(self._path)[0])
        return f"process {fields['pid']} on {fields['host']}" if fields else "another process"

    def _create(self) -> bool:
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        owner = {"mark": self._mark, "pid": os.getpid(), "started": _started(os.getpid()), **_machine()}
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(owner))
        return True

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._path)

    def _is_abandoned(self) -> bool:
        text, beat_ns = _read(self._path)
        now_s = time.monotonic()
        if self._seen is None or (self._seen.text, self._seen.beat_ns) != (text, beat_ns):
            self._seen = _Seen(text=text, beat_ns=beat_ns, since_s=now_s)
        return _is_dead(_fields(text)) or now_s - self._seen.since_s > STALE_AFTER_S

    def _break(self) -> None:
        """Take the dead owner's file away; a file that changed meanwhile is somebody else's, and is put back."""
        aside = self._path.with_name(f".{self._path.name}.{self._mark}")
        with suppress(OSError):
            os.rename(self._path, aside)
            if self._seen is not None and _read(aside)[0] != self._seen.text:
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, int]:
    """Contents and time of the last beat. Opened, since a network file system shows old times of closed files."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return "", 0


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:  # not yet written
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_dead(owner: dict[str, Any]) -> bool:
    if not owner or {name: owner.get(name) for name in _machine()} != _machine():
        return False
    try:
        os.kill(int(owner["pid"]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return bool(_started(int(owner["pid"])) != owner["started"])  # the number was given to another process


def _machine() -> dict[str, str]:
    """Where process numbers mean the same: the host since it started, and the container."""
    found = {"host": socket.gethostname()}
    with suppress(OSError):
        found["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        found["processes"] = os.readlink("/proc/self/ns/pid")
    return found


def _started(pid: int) -> str:
    """When a process began, in the kernel's words; empty where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
