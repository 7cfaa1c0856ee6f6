"""One save from staged copies to a committed, verified checkpoint, and the retention after it. Runs in any thread.

    agree on a fresh name -> write and commit -> read back and verify -> only then delete old checkpoints

All ranks of the group make the same calls in the same order; any failure becomes a SaveError on every rank.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.layout import (
    list_steps,
    make_root,
    quarantine,
    read_best,
    remove_stale_temporaries,
    remove_step,
    step_path,
    temporary_path,
    write_best,
)
from weft.checkpoint.reader import first_failure
from weft.checkpoint.staging import StagedPlanner
from weft.checkpoint.verify import DigestShare, check_checkpoint
from weft.checkpoint.writer import SaveJob, write_checkpoint
from weft.core.disk import is_full, no_space
from weft.core.errors import SaveError


@dataclass(frozen=True, kw_only=True)
class CommittedCheckpoint:
    """A checkpoint that is committed on disk and verified by reading it back."""

    step: int
    path: Path
    size_bytes: int
    save_s: float  # from staged to verified, in the background when asynchronous
    already_there: bool = False  # the step was already saved and is unchanged


@dataclass(frozen=True, kw_only=True)
class StagedSave:
    """A save from staged copies. `planner` is None if staging failed; `error` has the reason."""

    step: int
    meta: dict[str, Any]
    planner: StagedPlanner | None
    error: str = ""
    best: dict[str, Any] | None = None  # if it is the best so far: what best.json says about it


class Saver:
    """Runs staged saves, one after the other, and keeps the newest few."""

    def __init__(self, *, root: Path, exchange: Exchange, keep: int) -> None:
        self._root = root
        self._exchange = exchange
        self._keep = keep
        self._cleaned = False

    def run(self, save: StagedSave) -> CommittedCheckpoint:
        """Write, commit, verify, delete old ones. Raises only SaveError."""
        start = time.monotonic()
        temporary: Path | None = None
        try:
            temporary = self._begin(save)
            if temporary is not None:
                self._write(save, temporary)
            size_bytes = self._read_back(save)
        except (CheckpointException, Exception) as error:
            if temporary is not None and self._exchange.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _save_error(save.step, error) from error
        return CommittedCheckpoint(
            step=save.step,
            path=step_path(self._root, save.step),
            size_bytes=size_bytes,
            save_s=time.monotonic() - start,
            already_there=temporary is None,
        )

    def _begin(self, save: StagedSave) -> Path | None:
        """A fresh directory that all ranks agree on, or None if the step is already saved and valid."""
        name, error = "", save.error
        if self._exchange.rank == 0 and not error:
            name, error = self._prepare(save.step)
        answers = self._exchange.all_gather({"name": name, "error": error})
        for rank, answer in enumerate(answers):
            if answer["error"]:
                raise SaveError(f"{answer['error']} (rank {rank})")
        return self._root / answers[0]["name"] if answers[0]["name"] else None

    def _prepare(self, step: int) -> tuple[str, str]:
        """On rank 0 only: the fresh name (empty: nothing to do) and the error if there is none."""
        try:
            make_root(self._root)
            if not self._cleaned:
                # Not on opening a store: a reader must not delete files that a live run is writing.
                remove_stale_temporaries(self._root)
                self._cleaned = True
            if step in list_steps(self._root):
                if not check_checkpoint(self._root, step).reason:
                    return "", ""
                quarantine(step_path(self._root, step))
            temporary = temporary_path(self._root, step)
            temporary.mkdir()
            return temporary.name, ""
        except OSError as error:
            return "", no_space(self._root) if is_full(error) else first_failure(error)

    def _write(self, save: StagedSave, temporary: Path) -> None:
        if save.planner is None:
            raise SaveError(save.error)
        job = SaveJob(
            temporary=temporary,
            final=step_path(self._root, save.step),
            step=save.step,
            world_size=self._exchange.world_size,
            meta=save.meta,
        )
        write_checkpoint(save.planner, job, self._exchange.group)

    def _read_back(self, save: StagedSave) -> int:
        """Every rank reads its share from disk; old checkpoints are deleted only if the new one is complete."""
        step = save.step
        share = DigestShare(rank=self._exchange.rank, world_size=self._exchange.world_size)
        verdict = check_checkpoint(self._root, step, share=share, from_disk=True)
        reasons = [reason for reason in self._exchange.all_gather(verdict.reason) if reason]
        if self._exchange.rank == 0:
            with contextlib.suppress(OSError):
                quarantine(step_path(self._root, step)) if reasons else self._retain(save)
        self._exchange.from_rank_zero(None)  # no rank reports the save before rank 0 is done with the folder
        if reasons or verdict.manifest is None:
            raise SaveError(f"the written checkpoint failed verification, {reasons[0]}")
        return verdict.manifest.size_bytes

    def _retain(self, verified: StagedSave) -> None:
        """Delete checkpoints older than the one just verified and beyond the newest `keep`; never newer ones, never the
        best."""
        if verified.best is not None:
            write_best(self._root, {"step": verified.step, **verified.best})
        best = (read_best(self._root) or {}).get("step")
        older = [step for step in list_steps(self._root) if step < verified.step]
        for step in older[self._keep - 1 :]:
            if step != best:
                remove_step(self._root, step)


def _save_error(step: int, error: BaseException) -> SaveError:
    reason = error.message if isinstance(error, SaveError) else first_failure(error)
    return SaveError(
        f"The checkpoint of step {step} was not saved: {reason}.",
        hint="Older checkpoints are untouched. Make room or repair the folder.",
    )
