"""The lock of a token store, so that several processes do not build it twice.

It is not needed for correctness: an owner may lose it, and the store is committed by a rename. Waiting processes take
the owner for dead if it ran on this machine and ended, or if the file, which a live owner touches, was
unchanged for STALE_S of the waiting process's own clock.
"""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.core.lock_file import STALE_S, LockFile, Owner, parse_owner


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
        self._file = LockFile(path)
        self._seen: _Seen | None = None

    def acquire(self) -> bool:
        """Take the lock if it is free or its owner is gone; never waits."""
        if self._file.create(Owner()):
            return True
        if self._is_abandoned():
            self._break()
        return False

    def release(self) -> None:
        self._file.release()

    def owner(self) -> str:
        """The owner, for messages."""
        return str(parse_owner(_read(self._path)[0]) or "another process")

    def _is_abandoned(self) -> bool:
        text, beat_ns = _read(self._path)
        now_s = time.monotonic()
        if self._seen is None or (self._seen.text, self._seen.beat_ns) != (text, beat_ns):
            self._seen = _Seen(text=text, beat_ns=beat_ns, since_s=now_s)
        owner = parse_owner(text)
        return (owner is not None and owner.is_gone) or now_s - self._seen.since_s > STALE_S

    def _break(self) -> None:
        """Remove the old owner's file; a file that has changed belongs to another process and is restored."""
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(8)}")
        with suppress(OSError):
            os.rename(self._path, aside)
            if self._seen is not None and _read(aside)[0] != self._seen.text:
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)


def _read(path: Path) -> tuple[str, int]:
    """Contents and time of the last heartbeat. The file is opened: network file systems cache times of closed files."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return "", 0
