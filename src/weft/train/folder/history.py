"""`history/` of a run folder: the run.toml of every earlier span of steps, and the changes between them.

    history/run-00000000.toml   the run of steps 1 up to the first change
    history/changes.json        a list of {"step", "time", "changes": [{"key", "old", "new"}], "fresh_pass", "held_out"}

`step` is the last step before the change. A run without changes has no such folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.core.json_files import parse_json
from weft.core.records import StepRecord
from weft.core.run_spec import RunSpec
from weft.train.folder.changes import RunChange
from weft.train.folder.run_folder import write_whole

CHANGES_NAME = "changes.json"


class RunHistory:
    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "history"

    def read(self) -> list[dict[str, Any]]:
        """Entries by step; empty without a readable history."""
        try:
            entries = parse_json((self.path / CHANGES_NAME).read_bytes())
            return [entry for entry in entries if isinstance(entry["step"], int) and entry["changes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def asked_for(self) -> list[RunChange]:
        """All changes made by resumes."""
        return [RunChange(**change) for entry in self.read() for change in entry["changes"]]

    def record(self, step: int, old: RunSpec, changes: Sequence[RunChange]) -> None:
        """Record `changes` after `step`; entries of steps that will be repeated are removed."""
        entries = self.read()
        kept = [entry for entry in entries if entry["step"] < step]
        if changes:
            self.path.mkdir(exist_ok=True)
            began = kept[-1]["step"] if kept else 0
            write_whole(self.path / f"run-{began:08d}.toml", old.to_toml())
            kept.append(_entry(step, changes))
        if kept != entries:
            write_whole(self.path / CHANGES_NAME, json.dumps(kept, indent=1) + "\n")


def comparable(records: Sequence[StepRecord], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ledger facts of a run with changes: first loss and held-out loss on its current data."""
    if not entries:
        return {}
    data = max((entry["step"] for entry in entries if entry["fresh_pass"]), default=0)
    held_out = max((entry["step"] for entry in entries if entry["held_out"]), default=0)
    losses = [record.loss for record in records if record.step > data]
    evaluated = [record.eval_loss for record in records if record.step > held_out and record.eval_loss is not None]
    return {
        "changes": list(entries),
        "first_loss": losses[0] if losses else None,
        "eval_loss": evaluated[-1] if evaluated else None,
    }


def _entry(step: int, changes: Sequence[RunChange]) -> dict[str, Any]:
    return {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "changes": [change.as_dict() for change in changes],
        "fresh_pass": any(change.restarts_data for change in changes),
        "held_out": any(change.is_of_held_out for change in changes),
    }
