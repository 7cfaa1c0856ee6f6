"""The state of a run folder, and whether a new run or a resume may use it. Reads file names, changes nothing.

    new        missing or empty                                start: yes     resume: no run (W501)
    foreign    files that no run wrote                         start: W501    resume: no run (W501)
    unstarted  run.toml and plan.toml, no finished step        start: yes     resume: from step 0
    cut short  finished steps, no checkpoint, no ledger        start: W501    resume: from step 0
    unsaved    a run that ended and kept no checkpoint         start: W501    resume: W601
    damaged    checkpoints that failed verification, no other  start: W501    resume: W601
    saved      a checkpoint                                    start: W501    resume: from the checkpoint

Committed optimizer states in files (`offload.durable = "step"`) can be resumed from too, whatever the state. The
checkpoint store verifies a checkpoint when it loads one, as the engine does with files.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from weft.checkpoint.layout import list_damaged, list_steps
from weft.core.config import Document
from weft.core.errors import CheckpointError, InputError, RunFolderError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.folder.lock import LOCK_NAME
from weft.train.folder.run_folder import LOGS_NAME, RunFolder, require_run

_DOCUMENTS: dict[str, type[Document]] = {"run.toml": RunSpec, "plan.toml": Plan}
_NAMES = frozenset(
    {"metrics.jsonl", "checkpoints", "tensorboard", "model", "history", "offload", "bad_steps", "bad_steps.jsonl"}
)  # of a run without a finished step
_DRAFTS = frozenset({"run.tmp", "plan.tmp", "metrics.tmp"})


class FolderState(StrEnum):
    NEW = "new"
    FOREIGN = "foreign"
    UNSTARTED = "unstarted"
    CUT_SHORT = "cut short"
    UNSAVED = "unsaved"
    DAMAGED = "damaged"
    SAVED = "saved"


@dataclass(frozen=True, kw_only=True)
class FolderLook:
    """The state of a folder at one moment."""

    path: Path
    state: FolderState
    num_steps: int = 0  # finished, according to the metrics
    num_damaged: int = 0
    has_states: bool = False  # committed, in files

    @property
    def has_checkpoint(self) -> bool:
        return self.state is FolderState.SAVED

    @property
    def has_begun(self) -> bool:
        """Whether a run has finished a step here."""
        return self.state not in (FolderState.NEW, FolderState.FOREIGN, FolderState.UNSTARTED)

    def require_startable(self) -> str:
        """Require that a new run overwrites no old one; return a note about the folder."""
        if self.state is FolderState.NEW:
            return ""
        if self.state is FolderState.UNSTARTED:
            return f"{self.path} is from a start that finished no step; it is reused"
        raise RunFolderError(f"{self.path} exists already{_found(self)}", hint=_way_out(self))

    def require_resumable(self) -> str:
        """Require a run to resume; return a note if it restarts at step 0."""
        require_run(self.path)
        if self.has_states:
            return ""
        if self.state is FolderState.UNSAVED:
            raise CheckpointError(
                f"the run in {self.path} ended after step {self.num_steps} without a checkpoint",
                hint="train again into another --out, with checkpoint.at_end = true",
            )
        if self.state is FolderState.DAMAGED:
            raise CheckpointError(
                f"no usable checkpoint in {self.path / 'checkpoints'}: {self.num_damaged} failed verification"
                " and were set aside",
                hint="restore a copy of one, or train again into another --out",
            )
        if self.has_checkpoint:
            return ""
        repeated = f"; its {self.num_steps} recorded steps are repeated" if self.num_steps else ""
        return f"{self.path} has no checkpoint: the run starts at step 0{repeated}"


def look_at(path: Path) -> FolderLook:
    """The current state of the folder."""
    state, num_steps, num_damaged, has_states = FolderState.NEW, 0, 0, False
    if path.is_dir():
        names = {entry.name for entry in path.iterdir() if not _is_launchers(entry.name)}
        folder = RunFolder(path)
        num_steps = max((record.step for record in folder.metrics.read()), default=0)
        num_damaged = len(list_damaged(folder.checkpoints_path))
        has_states = folder.has_committed_states()
        state = _state(folder, names, num_steps=num_steps, num_damaged=num_damaged)
    elif path.exists():
        state = FolderState.FOREIGN
    return FolderLook(path=path, state=state, num_steps=num_steps, num_damaged=num_damaged, has_states=has_states)


def is_finished(path: Path, *, steps: int) -> bool:
    """Whether the run of the folder has made `steps` steps or ended by itself, and written its ledger."""
    facts = RunFolder(path).read_ledger().get("run", {})
    has_ended = facts.get("steps", 0) >= steps or bool(facts.get("ended"))
    return bool(facts.get("status") == "finished" and has_ended)


def require_free(path: Path) -> None:
    """Require an empty or missing folder, a lock file and logs aside."""
    if look_at(path).state is not FolderState.NEW:
        raise RunFolderError(f"{path} exists already", hint=f"choose another --out, or continue with --resume {path}")


def _state(folder: RunFolder, names: set[str], *, num_steps: int, num_damaged: int) -> FolderState:
    if not names:
        return FolderState.NEW
    if not names >= _DOCUMENTS.keys():
        return FolderState.UNSTARTED if _is_all_ours(folder.path, names) else FolderState.FOREIGN
    if list_steps(folder.checkpoints_path):
        return FolderState.SAVED
    if num_damaged:
        return FolderState.DAMAGED
    if folder.ledger_path.exists():
        return FolderState.UNSAVED
    if num_steps:
        return FolderState.CUT_SHORT
    return FolderState.UNSTARTED if _is_all_ours(folder.path, names) else FolderState.FOREIGN


def _is_all_ours(path: Path, names: set[str]) -> bool:
    """Whether all files are those of a new run, documents as weft prints them: a user's file is never overwritten."""
    documents = names & _DOCUMENTS.keys()
    is_known = bool(documents) and names <= _DOCUMENTS.keys() | _NAMES | _DRAFTS
    return is_known and all(_is_printed(path / name, _DOCUMENTS[name]) for name in documents)


def _is_printed(path: Path, kind: type[Document]) -> bool:
    try:
        return kind.from_file(path).to_toml() == path.read_text(encoding="utf-8")
    except (InputError, OSError):
        return False


def _is_launchers(name: str) -> bool:
    """The lock, and the logs of ranks on several hosts, whose first lines come before the run is created."""
    return name in (LOCK_NAME, LOGS_NAME) or name.startswith(f".{LOCK_NAME}-")


def _found(look: FolderLook) -> str:
    if look.state is FolderState.CUT_SHORT:
        return f", with {look.num_steps} finished steps and no checkpoint"
    return ""


def _way_out(look: FolderLook) -> str:
    """A hint that works: it names --resume only where a resume is not refused."""
    other = "choose another --out"
    if look.state is FolderState.CUT_SHORT:
        return f"{other}, or restart it with --resume {look.path}"
    if look.state is FolderState.SAVED:
        return f"{other}, or continue with --resume {look.path}"
    return other
