"""Changes of a run at its resumes, from history/changes.json of its folder, and the values that stay comparable.

A held-out loss on other data is another quantity: curves are split there, and only values after the last split count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.json_files import parse_json
from weft.report.series import Points

CHANGES = Path("history", "changes.json")
_NOT_TRAINED = ("checkpoint.", "logging.", "ledger.")
MAX_KEYS = 3  # named at a mark; the rest are counted


@dataclass(frozen=True, kw_only=True)
class ReportedChange:
    """`step` is the last one before the change."""

    step: int
    lines: tuple[str, ...]  # key: old -> new
    keys: tuple[str, ...]  # the keys that change the training
    is_of_data: bool
    is_of_held_out: bool

    @property
    def note(self) -> str:
        more = len(self.keys) - MAX_KEYS
        return ", ".join(self.keys[:MAX_KEYS]) + (f" and {more} more" if more > 0 else "")


def read_changes(run_dir: Path, remarks: list[str]) -> tuple[ReportedChange, ...]:
    """The changes by step; a remark where the file exists and cannot be read."""
    path = run_dir / CHANGES
    if not path.exists():
        return ()
    try:
        return tuple(_parse(entry) for entry in parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        remarks.append(f"{CHANGES} cannot be read: {error}.")
        return ()


def last_data_change(changes: Sequence[ReportedChange]) -> int:
    """The last step on data other than the current one."""
    return max((change.step for change in changes if change.is_of_data), default=0)


def last_held_out_change(changes: Sequence[ReportedChange]) -> int:
    return max((change.step for change in changes if change.is_of_held_out), default=0)


def split_held_out(points: Points, changes: Sequence[ReportedChange]) -> list[Points]:
    """The points by held-out data, without empty groups."""
    ends = [change.step for change in changes if change.is_of_held_out]
    groups: dict[int, Points] = {}
    for point in points:
        groups.setdefault(sum(point[0] > end for end in ends), []).append(point)
    return [groups[key] for key in sorted(groups)]


def _parse(entry: Any) -> ReportedChange:
    changed = entry["changes"]
    keys = [str(change["key"]) for change in changed]
    return ReportedChange(
        step=int(entry["step"]),
        lines=tuple(f"{change['key']}: {change['old']} -> {change['new']}" for change in changed),
        keys=tuple(key for key in keys if not key.startswith(_NOT_TRAINED)),
        is_of_data=bool(entry.get("fresh_pass")),
        is_of_held_out=bool(entry.get("held_out")),
    )
