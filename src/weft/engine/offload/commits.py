"""Commit records of state files (`offload.durable = "step"`): which step a file holds, whole and on its disk.

    rank-0-a.states  rank-0-a.json     two files, written alternately, each with its record
    rank-0-12.rest                     what else step 12 needs and does not fit into a record: buffers

A record names one or two steps: a step that float16 skips leaves the file as it is. It is written to another name,
synced, and renamed; its digest, its layout and the checksums of all spans say whether a file may be trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.disk import is_full, no_space
from weft.core.errors import DiskFullError, StateFileError
from weft.core.synced import sync_path

FORMAT = 1
KEPT = 2  # steps that a record names: ranks differ by at most one


@dataclass(frozen=True, kw_only=True)
class CommittedStep:
    """One step: `meta` as in a checkpoint's manifest, `counters` of the optimizer, the digest of the rest's file."""

    step: int
    meta: dict[str, Any]
    counters: list[float]
    rest: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    layout: str  # of the rank's states: a digest
    sums: list[int]
    steps: list[CommittedStep]


class CommitLog:
    """The records of one rank."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder, self._name = folder, f"rank-{rank}"

    def state_path(self, number: int) -> Path:
        return self.folder / f"{self._name}-{'ab'[number]}.states"

    def read(self, number: int) -> Record | None:
        """None without a record, or with one that is not whole."""
        try:
            outer = json.loads(self._record_path(number).read_text(encoding="utf-8"))
            fields = json.loads(outer["record"])
            if outer["sha256"] != _digest(outer["record"].encode()) or fields["format"] != FORMAT:
                return None
            steps = [CommittedStep(**step) for step in fields["steps"]]
            return Record(layout=fields["layout"], sums=fields["sums"], steps=steps)
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def write(self, number: int, record: Record) -> None:
        """Commit: when this returns, the record is on the disk."""
        text = json.dumps({"format": FORMAT, **asdict(record)})
        self._replace(
            self._record_path(number), json.dumps({"record": text, "sha256": _digest(text.encode())}).encode()
        )

    def write_rest(self, step: int, data: bytes) -> str:
        """Its digest."""
        self._replace(self._rest_path(step), data)
        return _digest(data)

    def read_rest(self, entry: CommittedStep) -> bytes | None:
        with contextlib.suppress(OSError):
            data = self._rest_path(entry.step).read_bytes()
            return data if _digest(data) == entry.rest else None
        return None

    def remove(self, number: int) -> None:
        """Before the file is written."""
        self._record_path(number).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove all records, before the files get contents that were not trained."""
        for number in range(2):
            self.remove(number)
        self.keep_rests(())
        if self.folder.is_dir():
            sync_path(self.folder)

    def keep_rests(self, steps: tuple[int, ...]) -> None:
        for path in self.folder.glob(f"{self._name}-*.rest"):
            if path not in [self._rest_path(step) for step in steps]:
                path.unlink(missing_ok=True)

    def _record_path(self, number: int) -> Path:
        return self.state_path(number).with_suffix(".json")

    def _rest_path(self, step: int) -> Path:
        return self.folder / f"{self._name}-{step}.rest"

    def _replace(self, path: Path, data: bytes) -> None:
        draft = path.with_suffix(path.suffix + ".tmp")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            sync_path(self.folder)
        except OSError as error:
            if is_full(error):
                raise DiskFullError(no_space(path), hint="free space there, then continue with --resume") from error
            raise StateFileError(
                f"{path} cannot be written ({error.strerror})", hint="repair the folder, then continue with --resume"
            ) from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
