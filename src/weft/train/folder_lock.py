"""The lock of a run folder: one run at a time writes into it, and `run.lock` says whose it is.

    the owner runs on this machine                               -> refused
    the owner is gone, or its pid is another process's by now    -> taken over
    an earlier start of the same torchrun or Slurm job           -> taken over
    the owner is on another machine, or in another container     -> refused until its heartbeat is STALE_S old

A flock of the folder orders processes that look at the same moment; where there is none, the exclusive creation of the
file still lets only one of them in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from weft.core.errors import FolderBusyError, RunFolderError
from weft.core.lock_file import STALE_S, LockFile, Owner, read_owner
from weft.train.rank_environment import read_process

LOCK_NAME = "run.lock"


class FolderLock:
    """Taken with `acquire`, left with the `with` block."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._file = LockFile(self.path)
        self._made_folder = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> str:
        """Take the lock, with the folder where there is none; returns a note about an earlier owner."""
        owner = Owner(job=_job(os.environ), restart=read_process(os.environ).restart_count)
        try:
            self._made_folder = not self.path.parent.exists()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self.path.parent):
                return "" if self._file.create(owner) else self._take_over(owner)
        except OSError as error:
            self._remove_folder()
            raise RunFolderError(
                f"the run folder {self.path.parent} cannot be written: {error}", hint="choose another --out"
            ) from None

    def release(self) -> None:
        """Give the folder free, and remove it where nothing was written into it; nothing where it was not acquired."""
        if self._file.release():
            self._remove_folder()

    @contextlib.contextmanager
    def released_by_failure(self) -> Iterator[None]:
        """Inside `report_failures`, which ends the process at once."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _take_over(self, owner: Owner) -> str:
        draft = self.path.with_name(f".{LOCK_NAME}-{owner.token}")
        try:
            draft.write_text(owner.to_json(), encoding="utf-8")
            # The file system's own clock: that of another machine may differ from ours.
            note = self._require_abandoned(owner, now_s=draft.stat().st_mtime)
            self._file.replace(draft, owner)
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

    def _remove_folder(self) -> None:
        if self._made_folder:
            with contextlib.suppress(OSError):  # it is in use by now, as it should be
                self.path.parent.rmdir()


def _why_abandoned(found: Owner | None, owner: Owner, *, age_s: float) -> str:
    """Why the lock is nobody's any more; empty where it is somebody's, or may be."""
    if found is not None and found.is_here:
        return "that process is gone" if found.is_gone else ""
    if found is not None and found.job and found.job == owner.job and owner.restart > found.restart:
        return "it was an earlier start of this job"
    return f"no sign of life for {age_s:.0f} s" if age_s > STALE_S else ""


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
