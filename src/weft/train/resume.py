"""The run folder that ranks agree on, and the continuation of the run that it holds.

Rank 0 locks the folder and reads its state; every rank continues from the same step, or refuses for the same reason.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.checkpoint import CheckpointStore, peek_newest
from weft.checkpoint.layout import list_steps
from weft.checkpoint.memory_copies import RestoredCopy
from weft.core.errors import CheckpointError
from weft.core.run_spec import RunSpec
from weft.core.state_folder import ANY_STEP
from weft.engine.state import meta_read
from weft.train.build import Workbench
from weft.train.folder.changes import (
    RunChange,
    change_of_content,
    changes_between,
    recorded_run,
    require_named,
    require_same_base,
)
from weft.train.folder.history import RunHistory
from weft.train.folder.lock import FolderLock
from weft.train.folder.run_folder import RunFolder
from weft.train.folder.state import FolderLook, FolderState, look_at
from weft.train.job import Job
from weft.train.loggers.display import Display
from weft.train.ranks.process import Process, phase

_PATH_BYTES = 4096  # Linux's limit on paths


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The start of a resumed run: samples consumed, the recorded run, the changes against it."""

    samples: int = 0
    run: RunSpec | None = None
    changes: list[RunChange] = field(default_factory=list)
    is_saved: bool = True  # whether a checkpoint has the state
    watched: dict[str, Any] | None = None  # of earlier evaluations and steps, if they are comparable


def agree_on_folder(
    job: Job, process: Process, lock: FolderLock, display: Display, *, device: torch.device
) -> tuple[RunFolder, int | None]:
    """Rank 0's folder, and the step of its newest checkpoint, on every rank; `ANY_STEP`: a resume without a checkpoint.

    A default name contains the time, and ranks start seconds apart."""
    with phase("opening the run folder", is_slow=True):
        look = _open_folder(job, process, lock, display) if process.is_main else None
        step = _after_step(job, process, look) if look is not None else None
        name = os.fsencode(job.out).ljust(_PATH_BYTES, b"\0") if process.is_main else bytes(_PATH_BYTES)
        code = (0 if step is None else step + 2).to_bytes(8, "little")
        letters = torch.frombuffer(bytearray(name + code), dtype=torch.uint8).to(device)
        dist.broadcast(letters, src=0)
    agreed_on = bytes(letters.tolist())
    found = int.from_bytes(agreed_on[-8:], "little")
    return RunFolder(Path(os.fsdecode(agreed_on[:-8].rstrip(b"\0")))), found - 2 if found else None


def _after_step(job: Job, process: Process, look: FolderLook) -> int | None:
    """The newest step that a resume continues from without states in files; None: a new run."""
    if look.has_checkpoint:
        return next(iter(list_steps(RunFolder(look.path).checkpoints_path)))
    may_continue = job.resume or job.continues or process.restart_count > 0
    return ANY_STEP if may_continue and look.has_states else None


def _open_folder(job: Job, process: Process, lock: FolderLock, display: Display) -> FolderLook:
    """Lock the folder, then read its state: it must not change between the two."""
    notes = [] if job.is_locked else [lock.acquire()]
    look = look_at(job.out)
    if process.restart_count == 0 or look.state is FolderState.DAMAGED:
        is_resume = job.resume or (job.continues and look.has_begun)
        notes.append(look.require_resumable() if is_resume else look.require_startable())
    if look.has_checkpoint:
        _require_named_early(job)
    for note in filter(None, notes):
        display.line(f"note: {note}")
    return look


def _require_named_early(job: Job) -> None:
    """Check changes before minutes are spent on data and model; `resume_run` checks those of the loaded checkpoint."""
    folder = RunFolder(job.out)
    with contextlib.suppress(CheckpointError):
        newest = peek_newest(folder.checkpoints_path)
        recorded = recorded_run(newest.meta if newest else {}, otherwise=folder.read_run())
        require_named(changes_between(recorded, job.run), job.may_change, RunHistory(job.out).asked_for())


def resume_run(
    job: Job,
    bench: Workbench,
    store: CheckpointStore | None,
    before: RunSpec,
    asked_before: list[RunChange],
    display: Display,
    *,
    restored: RestoredCopy | None,
) -> Resumed:
    """Continue from what is loaded already, states in files or copies in memory, or load the newest good checkpoint;
    check the changes of the requested run against it."""
    offload = bench.engine.offload
    meta = offload.memory.restored if offload is not None else None
    is_saved = meta is None and restored is None
    if restored is not None:
        meta = restored.meta
    for note in offload.memory.notes if offload is not None else ():
        display.line(f"note: {note}")
    if meta is None and store is None:
        display.line("note: the run starts at step 0")
        return Resumed()
    with phase("loading the checkpoint", is_slow=True):
        loaded = store.load(bench.engine.state()) if meta is None and store is not None else None
        meta = loaded.meta if loaded is not None else meta or {}
        recorded = recorded_run(meta, otherwise=before)
        changes = changes_between(recorded, job.run)
        if not any(change.restarts_data for change in changes):
            changes += change_of_content(meta.get("data"), bench.contents, job.run)
        require_named(changes, job.may_change, asked_before)
        require_same_base(meta, bench.base_digest, job.run)
    if loaded is not None or restored is not None:
        bench.engine.restore_meta(meta)
    for name, reason in loaded.rejected if loaded is not None else ():
        display.line(f"checkpoint {name} is damaged ({reason}); it was set aside")
    for note in loaded.notes if loaded is not None else ():
        display.line(f"note: {note}")
    where = loaded.path if loaded is not None else restored or "optimizer states in files"
    display.line(f"resuming from step {bench.engine.steps_done} ({where})")
    for change in changes:
        display.line(f"changed: {change}")
    is_fresh = any(change.restarts_data for change in changes)
    if is_fresh:
        display.line("note: the order of the data changed: the data restarts from its beginning")
    with meta_read():
        samples = 0 if is_fresh else int(meta["samples"])
        bench.training.restore(None if is_fresh else meta.get("stream"))
        watched = None if any(change.is_of_evaluation for change in changes) else meta.get("watched")
        return Resumed(samples=samples, run=recorded, changes=changes, is_saved=is_saved, watched=watched)
