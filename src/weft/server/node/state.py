"""The state of a server as a function of its log: tables, applied units, shares of steps that are incomplete.

    apply(frame, number)   the only way in which anything changes, live and in replay

A row stores the number of the last record that changed it. A snapshot copies rows while others change them; replay
then skips, row by row, the changes that a row already has. So a snapshot needs no pause, and no change is lost or
applied twice. There is no lock and no socket here: the owner calls from one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weft.core.config import parse
from weft.core.errors import TableError, WireError, WorkerError
from weft.core.table_spec import TableSpec
from weft.server.arrays import Keys
from weft.server.rates import push_rate
from weft.server.table.coalesce import coalesce
from weft.server.table.table import Table
from weft.server.units import UnitSet, passes_gate
from weft.server.wire.frame import NO_BODY, NO_UNIT, UNITS, Frame, Op, TableSection

MAX_NUMBER = 2**32 - 1  # rows store the numbers of records in 32 bits


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """The settings that all servers of a job share."""

    num_servers: int = 1
    shares: int = 1  # units per step
    gate: int | None = None  # steps that a pull may be ahead of the oldest unfinished one; None: never waits
    discount: float = 0.0  # power of the discount for staleness beyond shares - 1
    merge: Literal["sum", "average"] = "sum"  # of exchanges
    durability: Literal["none", "process", "disk"] = "process"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """All shares of a step, the last to arrive, and the number of its record."""

    shares: list[Frame]
    last: Frame
    number: int
    is_replay: bool


@dataclass
class State:
    spec: NodeSpec
    folder: Path | None = None  # where mapped tables have their files
    tables: list[Table] = field(default_factory=list)
    units: UnitSet = field(default_factory=UnitSet)
    clients: dict[int, int] = field(default_factory=dict)  # the last sequence number of each
    shares: dict[int, Frame] = field(default_factory=dict)  # by unit: of steps that are not complete
    pending: _Step | None = None  # a complete step whose update is not applied yet
    deleted: dict[int, list[Keys]] = field(default_factory=dict)  # by table, since the last snapshot

    def table(self, number: int) -> Table:
        if number >= len(self.tables):
            raise TableError(f"there is no table with the number {number}", hint="create it first")
        return self.tables[number]

    def number_of(self, spec: TableSpec) -> int | None:
        """The number of the table; None if it does not exist; raises if it exists with another spec."""
        for number, table in enumerate(self.tables):
            if table.spec.name == spec.name:
                require_same(table.spec, spec)
                return number
        return None

    def require_possible(self, spec: TableSpec) -> None:
        """Before the record of a table is logged: a table that cannot be created would end every replay."""
        Table(spec, folder=self.folder)

    def require_fitting(self, frame: Frame) -> None:
        """Before a frame is logged: the log holds only frames that can be applied."""
        _require_form(frame)
        for section in frame.tables:
            table = self.table(section.table)
            if frame.op != Op.DELETE and section.shape[1:] != (table.spec.dim, section.keys.size, section.keys.size):
                _, dim, num_keys, num_rows = section.shape
                raise TableError(
                    f"table {table.spec.name!r} has rows of {table.spec.dim} columns, the request {num_rows} rows of"
                    f" {dim} columns for {num_keys} keys",
                    hint="give one gradient of the row's width for each key",
                )

    def require_room(self, frame: Frame) -> None:
        """Room for the frame, and for acknowledged shares whose update is not applied yet."""
        if frame.op == Op.DELETE:
            return
        wanted: dict[int, list[Keys]] = {section.table: [] for section in frame.tables}
        for each in (frame, *self.shares.values(), *(self.pending.shares if self.pending else ())):
            for section in each.sections:
                if section.table in wanted:
                    wanted[section.table].append(section.keys)
        for number, batches in wanted.items():
            self.table(number).require_room(batches)

    def is_new(self, frame: Frame) -> bool:
        """Whether the frame was not applied before: by its units, else by the sequence number of its client."""
        known = [unit in self.units or unit in self.shares for unit in frame.units]
        if any(known) and not all(known):
            raise WorkerError("some units of this exchange were done by another worker", hint="do the others again")
        if known:
            return not any(known)
        return frame.client == 0 or frame.sequence > self.clients.get(frame.client, 0)

    def lr_scale_of(self, frame: Frame) -> tuple[int, float]:
        """(staleness, factor of the learning rate), from the units that were applied since the pull."""
        if frame.unit == NO_UNIT or self.spec.gate == 0:
            return 0, frame.lr_scale
        staleness = max(0, len(self.units) - frame.version)
        beyond = max(0, staleness - (self.spec.shares - 1)) / self.spec.shares
        return staleness, frame.lr_scale * (1 + beyond) ** -self.spec.discount

    def is_open(self, unit: int) -> bool:
        """Whether a pull for this unit may read."""
        done = self.units.watermark
        return unit == NO_UNIT or passes_gate(unit, done=done, shares=self.spec.shares, gate=self.spec.gate)

    def apply_pending(self, *, reader: int = NO_UNIT) -> None:
        """Applies the update of a complete step, except for a reader of that same step.

        A worker may die when some servers have its share and others do not. The worker that repeats its unit must
        read the same rows, also on servers where the step is complete. A reader of the next step proves that every
        server has all shares of this one.
        """
        step = self.pending
        if step is None or (reader != NO_UNIT and reader <= step.shares[-1].unit):
            return
        self.pending = None
        weight = sum(share.weight for share in step.shares)
        for section in _summed(step.shares) if weight else ():
            self._change(step.last._replace(weight=weight), section, step.number, is_replay=step.is_replay)

    def apply(self, frame: Frame, number: int, *, is_replay: bool = False) -> None:
        self.apply_pending()
        if frame.op == Op.CONTROL:
            self._create(frame)
        elif frame.op == Op.DELETE:
            self._delete(frame, number, is_replay=is_replay)
        elif frame.unit != NO_UNIT and self.spec.gate == 0:
            self._take_share(frame, number, is_replay=is_replay)
        else:
            for section in frame.tables:
                self._change(frame, section, number, is_replay=is_replay)
            self._remember(frame)

    def head(self) -> dict[str, Any]:
        """Everything but rows and waiting shares, as JSON."""
        return {
            "spec": self.spec.as_dict(),
            "units": self.units.as_dict(),
            "clients": {str(client): sequence for client, sequence in self.clients.items()},
            "tables": [table.spec.model_dump(mode="json") for table in self.tables],
        }

    def load_head(self, head: dict[str, Any]) -> None:
        self.units = UnitSet(**head["units"])
        self.clients = {int(client): sequence for client, sequence in head["clients"].items()}

    def open_table(self, spec: TableSpec) -> Table:
        self.tables.append(Table(spec, folder=self.folder))
        return self.tables[-1]

    def _create(self, frame: Frame) -> None:
        spec = parse(TableSpec, frame.json(), source="the table")
        if self.number_of(spec) is None:
            self.open_table(spec)

    def _delete(self, frame: Frame, number: int, *, is_replay: bool) -> None:
        for section in frame.tables:
            table, keys = self.table(section.table), section.keys
            if is_replay:
                keys = keys[table.last_seen(keys) < number]
            table.delete(keys)
            self.deleted.setdefault(section.table, []).append(np.array(keys))
        self._remember(frame)

    def _take_share(self, frame: Frame, number: int, *, is_replay: bool) -> None:
        """A share waits for the others of its step; with the last one the update is pending, in order of shares."""
        self.shares[frame.unit] = detached(frame)
        first = frame.unit // self.spec.shares * self.spec.shares
        own = range(first, first + self.spec.shares)
        if any(unit not in self.shares for unit in own):
            return
        shares = [self.shares.pop(unit) for unit in own]
        self.pending = _Step(shares=shares, last=shares[frame.unit - first], number=number, is_replay=is_replay)
        for unit in own:
            self.units.add(unit)

    def _change(self, frame: Frame, section: TableSection, number: int, *, is_replay: bool) -> None:
        table, keys, values = self.table(section.table), section.keys, section.values
        if values is None or not keys.size:
            return
        if is_replay:
            is_due = table.last_seen(keys) < number
            keys, values = keys[is_due], values[is_due]
        if frame.op == Op.PUSH:
            scale = 1.0 / frame.weight if frame.weight else 0.0
            table.push(
                keys, values, lr_scale=frame.lr_scale * self._rate_of(frame, table), gradient_scale=scale, clock=number
            )
        elif frame.op == Op.EXCHANGE:
            # The whole delta, or its share of an average: see `server/rates.py`.
            scale = 1.0 if self.spec.merge == "sum" else 1.0 / self.spec.shares
            table.add(keys, values * np.float32(scale), clock=number)
        else:
            table.assign(keys, values, only_absent=frame.weight == 1.0, clock=number)

    def _rate_of(self, frame: Frame, table: Table) -> float:
        """The factor for an update by one share; 1 for an update of a whole step."""
        is_share = frame.unit != NO_UNIT and self.spec.gate != 0
        return push_rate(table.spec.optimizer, shares=self.spec.shares) if is_share else 1.0

    def _remember(self, frame: Frame) -> None:
        for unit in frame.units:
            self.units.add(unit)
        if not frame.units and frame.client:
            self.clients[frame.client] = frame.sequence


def _require_form(frame: Frame) -> None:
    """A change has no text; only a push may have a unit, only an exchange may list units."""
    listed = [section for section in frame.sections if section.table == UNITS]
    is_right = not frame.text and frame.unit >= NO_UNIT
    if frame.unit != NO_UNIT:
        is_right &= frame.op == Op.PUSH
    if listed:
        is_right &= frame.op == Op.EXCHANGE and len(listed) == 1 and listed[0].values is None
    if not is_right:
        raise WireError(f"a frame {frame.op.name} has fields of another operation")


def require_same(there: TableSpec, asked: TableSpec) -> None:
    if there == asked:
        return
    now, then = asked.model_dump(), there.model_dump()
    name = next(key for key in now if now[key] != then[key])
    raise TableError(
        f"table {asked.name!r} exists with another {name}: {then[name]}, not {now[name]}",
        hint="give the table another name, or train in another folder",
    )


def detached(frame: Frame) -> Frame:
    """A copy of the frame: the reader of a connection reuses its memory."""
    sections = [
        TableSection(table, np.array(keys), None if values is None else np.array(values))
        for table, keys, values in frame.sections
    ]
    return frame._replace(sections=sections, body=NO_BODY)


def _summed(shares: Iterable[Frame]) -> list[TableSection]:
    """Gradients of equal keys summed in order of shares, so that no bit depends on the order of arrival."""
    by_table: dict[int, list[TableSection]] = {}
    for share in shares:
        for section in share.sections:
            if section.values is not None:
                by_table.setdefault(section.table, []).append(section)
    found = []
    for table, sections in sorted(by_table.items()):
        keys = np.concatenate([section.keys for section in sections])
        values = np.concatenate([section.values for section in sections if section.values is not None])
        found.append(TableSection(table, *coalesce(keys, values)))
    return found


def create_frame(spec: TableSpec) -> Frame:
    return Frame(op=Op.CONTROL, text=json.dumps(spec.model_dump(mode="json")).encode())
