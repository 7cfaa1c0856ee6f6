"""Checkpoints of one run: save in the background, raise failures at the next step, load the newest valid one.

It knows no model or optimizer: it stores a flat dictionary of tensors and a JSON value.

    save():  wait for the previous save -> copy the state -> return; a thread writes, commits and verifies
    load():  newest first; every rank verifies a share; all agree; a bad one is quarantined and the next is tried

`dcp.async_save` would keep the error in a future, has no hook for the read-back and the retention after the commit, and
does not report a failed staging to the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from weft.checkpoint.exchange import Exchange
from weft.checkpoint.layout import list_steps, quarantine, step_path
from weft.checkpoint.manifest import Manifest
from weft.checkpoint.match import require_match, without_other_ranks
from weft.checkpoint.older import with_stored_shapes
from weft.checkpoint.reader import first_failure, load_into
from weft.checkpoint.saver import CommittedCheckpoint, Saver, StagedSave
from weft.checkpoint.staging import StagedPlanner, StagingBuffers, local_shards
from weft.checkpoint.verify import NOTHING, CheckpointVerdict, DigestShare, check_checkpoint
from weft.core.errors import CheckpointError, SaveError


@dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """A loaded (or only inspected) checkpoint, and the rejected newer ones: (name, reason), newest first."""

    step: int
    meta: dict[str, Any]
    path: Path
    rejected: list[tuple[str, str]]
    notes: tuple[str, ...] = ()  # what was not loaded


class CheckpointStore:
    """All ranks of the group make the same calls in the same order; `poll`, `list` and `newest_step` are local."""

    def __init__(self, root: Path, *, process_group: dist.ProcessGroup | None = None, keep: int = 2) -> None:
        """`process_group`: a separate Gloo group, which the save thread uses while training communicates."""
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        self.root = root
        self._exchange = Exchange(process_group)
        self._saver = Saver(root=root, exchange=self._exchange, keep=keep)
        self._buffers = StagingBuffers()
        self.history: list[CommittedCheckpoint] = []  # committed by this store, oldest first
        self._committed: deque[CommittedCheckpoint] = deque()
        self._failed: deque[SaveError] = deque()
        self._thread: threading.Thread | None = None

    def save(
        self,
        state: dict[str, Tensor],
        meta: dict[str, Any],
        *,
        step: int,
        asynchronous: bool = True,
        best: dict[str, Any] | None = None,
    ) -> None:
        """Save the state of a step. When this returns the tensors may change. `best`: it is the best so far, and why;
        it stays until another is.

        A failure of this save is raised here when synchronous, else by the next `poll` or `wait`. A failure of the
        previous save stays with `poll`: raised here, the other ranks would wait in this save.
        """
        self._join()
        staged = self._stage(state, json.loads(json.dumps(meta)), step=step, copy=asynchronous)
        staged = replace(staged, best=best)
        if not asynchronous:
            self._carry_out(staged)
            return
        self._thread = threading.Thread(target=self._run, args=(staged,), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def poll(self) -> CommittedCheckpoint | None:
        """Raise the error of a failed save, else return the newest checkpoint committed since the last call."""
        if self._failed:
            raise self._failed.popleft()
        newest = None
        while self._committed:
            newest = self._committed.popleft()
        return newest

    def wait(self) -> CommittedCheckpoint | None:
        """`poll` after the end of the save in flight."""
        self._join()
        return self.poll()

    def load(self, state: dict[str, Tensor], *, step: int | None = None) -> LoadedCheckpoint:
        """Fill the given tensors in place from the newest good checkpoint, or from that of `step` and no other."""
        self._join()
        found, manifest = self._choose(step)
        state = with_stored_shapes(state, manifest)
        state, expected, notes = without_other_ranks(state, manifest, self._exchange)
        require_match(state, expected, self._exchange, name=found.path.name)
        load_into(state, found.path, manifest, self._exchange.group)
        return replace(found, notes=notes)

    def list(self) -> list[int]:
        """Committed steps, newest first, by name; not verified."""
        return list_steps(self.root)

    def newest_step(self) -> int | None:
        return next(iter(list_steps(self.root)), None)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _stage(self, state: dict[str, Tensor], meta: dict[str, Any], *, step: int, copy: bool) -> StagedSave:
        shards = local_shards(state)
        try:
            planner = StagedPlanner(state, self._buffers.copy(shards) if copy else shards)
        except Exception as error:  # no host memory, for example: must be reported to the other ranks, which wait
            return StagedSave(step=step, meta=meta, planner=None, error=first_failure(error))
        return StagedSave(step=step, meta=meta, planner=planner)

    def _run(self, staged: StagedSave) -> None:
        try:
            self._carry_out(staged)
        except SaveError as error:
            self._failed.append(error)

    def _carry_out(self, staged: StagedSave) -> None:
        committed = self._saver.run(staged)
        self.history.append(committed)
        self._committed.append(committed)

    def _choose(self, step: int | None) -> tuple[LoadedCheckpoint, Manifest]:
        candidates: list[int] = self._exchange.from_rank_zero(list_steps(self.root) if step is None else [step])
        rejected: list[tuple[str, str]] = []
        for candidate in candidates:
            path = step_path(self.root, candidate)
            verdict = self._judge(candidate)
            if verdict.manifest is not None:
                found = LoadedCheckpoint(step=candidate, meta=verdict.manifest.meta, path=path, rejected=rejected)
                return found, verdict.manifest
            rejected.append((path.name, verdict.reason))
        raise _nothing_good(self.root, rejected)

    def _judge(self, step: int) -> CheckpointVerdict:
        """The common verdict of all ranks, equal on each. Rank 0 quarantines a bad checkpoint."""
        share = DigestShare(rank=self._exchange.rank, world_size=self._exchange.world_size)
        verdict = check_checkpoint(self.root, step, share=share)
        digest = verdict.manifest.sha256 if verdict.manifest else ""
        answers = self._exchange.all_gather({"reason": verdict.reason, "manifest": digest})
        reasons = [answer["reason"] for answer in answers if answer["reason"]]
        if not reasons and len({answer["manifest"] for answer in answers}) > 1:
            reasons = ["the ranks see different manifests"]
        if not reasons:
            return verdict
        reason = self._exchange.from_rank_zero(self._set_aside(step, reasons[0]) if self._exchange.rank == 0 else "")
        return CheckpointVerdict(manifest=None, reason=reason)

    def _set_aside(self, step: int, reason: str) -> str:
        path = step_path(self.root, step)
        if not path.exists():
            return "it does not exist"
        if not check_checkpoint(self.root, step).reason:
            # A node that does not see the folder must not quarantine a good checkpoint.
            return f"{reason} (on another rank only: is the folder the same on all of them?)"
        with contextlib.suppress(OSError):  # a read-only folder: skip the checkpoint
            quarantine(path)
        return reason


def peek_newest(root: Path, *, step: int | None = None) -> LoadedCheckpoint | None:
    """The manifest of the newest checkpoint whose manifest and file sizes are right; None if there is no checkpoint.

    For one process, before the model is built: it reads no data and moves nothing; `load` verifies fully.
    """
    rejected: list[tuple[str, str]] = []
    for candidate in list_steps(root) if step is None else [step]:
        path = step_path(root, candidate)
        verdict = check_checkpoint(root, candidate, share=NOTHING)
        if verdict.manifest is not None:
            return LoadedCheckpoint(step=candidate, meta=verdict.manifest.meta, path=path, rejected=rejected)
        rejected.append((path.name, verdict.reason))
    if rejected:
        raise _nothing_good(root, rejected)
    return None


def _nothing_good(root: Path, rejected: list[tuple[str, str]]) -> CheckpointError:
    if not rejected:
        return CheckpointError(f"There is no checkpoint in {root}.", hint="Start the run without resuming.")
    listing = "; ".join(f"{name}: {reason}" for name, reason in rejected)
    others = [step for step in list_steps(root) if step_path(root, step).name not in dict(rejected)]
    hint = f"Checkpoints of these steps exist: {others}." if others else "Start again, or restore a copy of one."
    return CheckpointError(f"No usable checkpoint in {root}: {listing}.", hint=hint)
