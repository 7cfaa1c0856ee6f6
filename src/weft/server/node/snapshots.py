"""Snapshots of a server: taken while it works, and restored at its start, with the log on top.

Rows are copied in small pieces under the server's lock, files are written outside of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.config import parse
from weft.core.errors import CheckpointError, LogError
from weft.core.json_files import parse_json_table
from weft.core.table_spec import TableSpec
from weft.server.durable.log import Log, replay
from weft.server.durable.snapshot import Snapshot, SnapshotWriter, chain, drop_older
from weft.server.node.state import NodeSpec, State
from weft.server.table.record import META_DTYPE, record_dtype
from weft.server.table.table import Table
from weft.server.units import UnitSet
from weft.server.wire.frame import Frame, logged_frame

LOG = "log"
_SPEC = "node.json"
COPY_BYTES = 4 << 20  # copied at a time under the lock: a pause of about half a millisecond


def restore(
    folder: Path, spec: NodeSpec | None = None, *, with_log: bool = True, is_live: bool = False
) -> tuple[State, int]:
    """The state, and the number of the last record in it. `with_log=False`: as of the last snapshot.

    `spec`: of a folder that stores none. `is_live`: for a server that continues: a worker may repeat a share of the
    last step, and must read the rows of before. A mere reader of the folder reads every complete step.
    """
    snapshots = chain(folder)
    state = State(spec=_stored_spec(folder, snapshots, spec or NodeSpec()), folder=folder)
    number = 0
    if snapshots:
        number = snapshots[-1].number
        _load(state, snapshots)
    if with_log and (folder / LOG).is_dir():
        for record in replay(folder / LOG, after=number):
            state.apply(logged_frame(record.head, record.body), record.number, is_replay=True)
            number = record.number
    if not is_live:
        state.apply_pending()
    return state, number


def keep_spec(folder: Path, spec: NodeSpec) -> None:
    """The meaning of log records depends on the spec; a snapshot holds it too."""
    draft = folder / f"{_SPEC}.tmp"
    try:
        draft.write_text(json.dumps(spec.as_dict()), encoding="utf-8")
        draft.replace(folder / _SPEC)
    except OSError as error:
        raise LogError(
            f"the server's folder {folder} cannot be written: {error.strerror}", hint="make room on that disk"
        ) from None


def adopt(state: State, spec: NodeSpec) -> bool:
    """Continue under another spec; another number of shares renumbers the units. Returns whether anything differs."""
    old = state.spec
    if replace(old, durability=spec.durability) == spec:
        state.spec = spec
        return False
    state.apply_pending()
    if old.num_servers != spec.num_servers:
        raise CheckpointError(
            f"the folder holds 1 of {old.num_servers} servers, the run has {spec.num_servers}",
            hint=f"continue with --servers {old.num_servers}, or reshard the folder first",
        )
    steps, rest = divmod(state.units.watermark, old.shares)
    is_between_steps = not rest and len(state.units) == state.units.watermark and not state.shares
    if (old.shares, old.gate == 0) != (spec.shares, spec.gate == 0) and not is_between_steps:
        raise CheckpointError(
            f"step {steps + 1} was interrupted: some of its {old.shares} shares are in, and some are not",
            hint=f"finish it with --workers {old.shares} and the same mode, then change them",
        )
    if old.shares != spec.shares:
        state.units = UnitSet(steps * spec.shares)
    state.spec = spec
    return True


def _stored_spec(folder: Path, snapshots: list[Snapshot], spec: NodeSpec) -> NodeSpec:
    if snapshots:
        return NodeSpec(**snapshots[-1].head["spec"])
    path = folder / _SPEC
    try:
        return NodeSpec(**parse_json_table(path.read_bytes())) if path.exists() else spec
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", hint="restore the folder from a copy") from None


def _load(state: State, snapshots: list[Snapshot]) -> None:
    head = snapshots[-1].head
    for fields in head["tables"]:
        state.open_table(parse(TableSpec, fields, source=str(snapshots[-1].path)))
    state.load_head(head)
    for snapshot in snapshots:
        for number in range(len(snapshot.head["tables"])):
            _load_table(state.tables[number], number, snapshot)
    for number, table in enumerate(state.tables):
        for piece in snapshots[-1].read(f"candidates-{number}.rows"):
            table.load_candidates(piece.view(META_DTYPE))
    for share in map(_share, snapshots[-1].read("shares.bin")):
        state.shares[share.unit] = share


def _load_table(table: Table, number: int, snapshot: Snapshot) -> None:
    for piece in snapshot.read(f"table-{number}.deleted"):
        table.delete(piece.view(np.int64))
    for piece in snapshot.read(f"table-{number}.rows"):
        table.load_records(piece.view(record_dtype(table.spec)))


def share_pieces(state: State) -> list[NDArray[np.uint8]]:
    """The waiting shares, one piece each: the length of the head, the head, the body."""
    pieces = []
    for frame in state.shares.values():
        parts = [np.frombuffer(part, np.uint8) for part in frame.parts() if len(part)]
        length = np.array([parts[0].size], np.int64).view(np.uint8)
        pieces.append(np.concatenate([length, *parts]))
    return pieces


def _share(piece: NDArray[np.uint8]) -> Frame:
    end = 8 + int(piece[:8].view(np.int64)[0])
    return logged_frame(piece[8:end].tobytes(), np.array(piece[end:]))


@dataclass
class Snapshots:
    folder: Path
    state: State
    log: Log | None
    lock: Any  # the server's
    last: Callable[[], int]  # the number of the last change
    apply_pending: Callable[[], None]  # raises if memory lacks a record of the log: then the log must stay
    _one_at_a_time: threading.Lock = field(default_factory=threading.Lock)
    _last: int | None = None  # the number of the last snapshot of this process: the base of an incremental one

    def take(self, *, incremental: bool) -> int:
        """Returns the number of the committed snapshot. The first one of a process is full."""
        with self._one_at_a_time:
            base, self._last = (self._last if incremental else None), None  # after a failure the next one is full
            with self.lock:
                self.apply_pending()
                number = self.last()
                head, shares = self.state.head(), share_pieces(self.state)
                candidates = [table.candidates() for table in self.state.tables]
                deleted, self.state.deleted = self.state.deleted, {}
            if base == number:
                self._last = number
                return number
            writer = SnapshotWriter(self.folder, number, base)
            for place, table in enumerate(self.state.tables[: len(candidates)]):
                writer.write(f"table-{place}.rows", self._rows(table, since=base + 1 if base is not None else None))
                writer.write(f"candidates-{place}.rows", [candidates[place]])
                writer.write(f"table-{place}.deleted", deleted.get(place, []) if base is not None else [])
            writer.write("shares.bin", shares)
            writer.commit(head)
            self._last = number
            drop_older(self.folder, keep=chain(self.folder))
            if self.log is not None:
                with self.lock:
                    self.log.retire(before=number + 1)
            return number

    def _rows(self, table: Table, *, since: int | None) -> Iterator[NDArray[np.void]]:
        step = max(1, COPY_BYTES // table.record_bytes)
        for start in range(0, table.num_slots, step):
            with self.lock:
                records = table.records(start, start + step, since=since)
            yield records
