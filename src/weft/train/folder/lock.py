"""The lock of a run folder: one run at a time writes into it, and `run.lock` names the owner.

    the owner runs on this machine                               -> refused
    the owner ended, or its pid belongs to another process now   -> taken over
    an earlier start of the same torchrun, Slurm or cluster job  -> taken over
    the owner is on another machine, or in another container     -> refused until its heartbeat is STALE_S old

A flock of the folder orders processes that check at the same moment; on file systems without flock, the exclusive
creation of the file still admits only one of them.
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
from weft.train.ranks.environment import ATTEMPT_VARIABLE, JOB_VARIABLE, read_process

LOCK_NAME = "run.lock"
_RESTARTS = 10_000  # more than the ranks of one attempt are ever restarted


class FolderLock:
    """`acquire` takes the lock; the end of the `with` block releases it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._file = LockFile(self.path)
        self._made_folder = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> str:
        """Take the lock, creating the folder if it is missing; return a note about an earlier owner."""
        owner = Owner(job=_job(os.environ), restart=_restart(os.environ))
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
        """Release the lock if it was acquired, and remove the folder if this lock created it and it is empty."""
        if self._file.release():
            self._remove_folder()

    @contextlib.contextmanager
    def released_by_failure(self) -> Iterator[None]:
        """Release on failure; for use inside `report_failures`, which ends the process at once."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _take_over(self, owner: Owner) -> str:
        draft = self.path.with_name(f".{LOCK_NAME}-{owner.token}")
        try:
            draft.write_text(owner.to_json(), encoding="utf-8")
            # The file system's clock: another machine's clock may differ from ours.
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
            with contextlib.suppress(OSError):  # it has files by now
                self.path.parent.rmdir()


def _why_abandoned(found: Owner | None, owner: Owner, *, age_s: float) -> str:
    """Why the lock has no owner any more; empty if it has one, or may have one."""
    if found is not None and found.is_here:
        return "that process is gone" if found.is_gone else ""
    if found is not None and found.job and found.job == owner.job and owner.restart > found.restart:
        return "it was an earlier start of this job"
    return f"no heartbeat for {age_s:.0f} s" if age_s > STALE_S else ""


def _job(environment: Mapping[str, str]) -> str:
    if given := environment.get(JOB_VARIABLE):
        return given
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if run not in ("", "none"):  # torchrun's name for a job without a name
        return f"torchrun {run}"
    slurm = environment.get("SLURM_JOB_ID", "")
    return f"slurm {slurm}" if slurm else ""


def _restart(environment: Mapping[str, str]) -> int:
    """A number that grows with each start of the job by its cluster, and with each restart of the ranks inside it."""
    attempt = environment.get(ATTEMPT_VARIABLE, "")
    return (int(attempt) if attempt.isdecimal() else 0) * _RESTARTS + read_process(environment).restart_count


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
