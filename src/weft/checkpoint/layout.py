"""Names of checkpoints on disk and the renames between them. It does not read a checkpoint's contents.

    .tmp-<step>-<id>/   being written, or left by a killed run
    step-00000100/      committed; never written again
    .bad-<name>-<id>/   was committed, failed verification, kept as evidence
    best.json           the step of the best checkpoint, which no retention deletes, and why it is

The order that matters: files, fsync, directory fsync, rename, parent fsync. The rename is the commit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from weft.core.json_files import parse_json_table
from weft.core.synced import sync_path

_STEP_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY, _BAD = ".tmp-", ".bad-"
_BEST = "best.json"


def step_path(root: Path, step: int) -> Path:
    """The path of the committed checkpoint of a step."""
    return root / f"step-{step:08d}"


def temporary_path(root: Path, step: int) -> Path:
    """A name that no other save, past or present, has used."""
    return root / f"{_TEMPORARY}{step:08d}-{uuid.uuid4().hex}"


def list_steps(root: Path) -> list[int]:
    """Committed steps, newest first, by name only: nothing is verified here."""
    if not root.is_dir():
        return []
    found = [_STEP_NAME.fullmatch(entry.name) for entry in root.iterdir()]
    steps = [(int(match[1]), match[0]) for match in found if match]
    # "step-000000007" would parse as step 7, which has another path.
    return sorted((step for step, name in steps if name == step_path(root, step).name), reverse=True)


def write_best(root: Path, facts: dict[str, Any]) -> None:
    """Record a committed checkpoint as the best: its "step", and what the caller knows about it."""
    draft = temporary_path(root, facts["step"]).with_suffix(".json")
    draft.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    sync_path(draft)
    draft.replace(root / _BEST)
    sync_path(root)


def read_best(root: Path) -> dict[str, Any] | None:
    """The facts of the best checkpoint; None if none was recorded, or it is gone."""
    try:
        facts = parse_json_table((root / _BEST).read_bytes())
        return facts if step_path(root, int(facts["step"])).is_dir() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def list_damaged(root: Path) -> list[str]:
    """Names of quarantined checkpoints, which failed verification."""
    return sorted(entry.name for entry in root.iterdir() if entry.name.startswith(_BAD)) if root.is_dir() else []


def make_root(root: Path) -> None:
    """Create the folder for all checkpoints of a run, durably."""
    if not root.is_dir():
        root.mkdir(parents=True)
        sync_path(root.parent)


def commit(temporary: Path, final: Path) -> None:
    """Make a finished directory the checkpoint of its step. A non-empty `final` makes the rename fail, by design."""
    sync_path(temporary)
    os.rename(temporary, final)
    sync_path(final.parent)


def quarantine(path: Path) -> Path:
    """Quarantine a damaged checkpoint: rename it, for later inspection."""
    bad = path.with_name(f"{_BAD}{path.name}-{uuid.uuid4().hex[:8]}")
    os.rename(path, bad)
    sync_path(path.parent)
    return bad


def remove_step(root: Path, step: int) -> None:
    """Delete a committed checkpoint. Renamed first: a kill half-way must not leave a partial `step-` directory."""
    doomed = temporary_path(root, step)
    os.rename(step_path(root, step), doomed)
    sync_path(root)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_stale_temporaries(root: Path) -> list[str]:
    """Delete leftovers of killed runs. Only a writer that has no save in flight may call this."""
    stale = [entry for entry in root.iterdir() if entry.name.startswith(_TEMPORARY)]
    for entry in stale:
        entry.unlink() if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
    return [entry.name for entry in stale]
