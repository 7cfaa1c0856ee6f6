"""One parameter server: tables and their log behind a socket.

    PULL     waits for the gate, reads rows under the lock, answers
    PUSH     is it new? -> log -> apply -> acknowledge; what was applied before is acknowledged again, and no more
    EXCHANGE as PUSH, and answers with the rows as they are then

One lock orders the log and the changes alike. Kernels, the log's writes and sockets run without the interpreter's
lock, so connections overlap everywhere else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.config import parse
from weft.core.errors import LogError, RunError, ServerLostError, TableError, WeftError, WireError
from weft.core.table_spec import TableSpec
from weft.server.durable.log import Log
from weft.server.node.figures import Figures
from weft.server.node.restore import LOG, adopt, keep_spec, restore
from weft.server.node.snapshots import Snapshots
from weft.server.node.spec import NodeSpec
from weft.server.node.state import MAX_NUMBER, State, create_frame
from weft.server.table.table import Table
from weft.server.wire.endpoint import Endpoint
from weft.server.wire.frame import NO_UNIT, Frame, Op, Section, control, send_frame
from weft.server.wire.listener import Listener
from weft.server.wire.reader import FrameReader

TOLD_EVERY_S = 5.0  # a waiting client hears why
_DEFECT_HINT = "this was not foreseen; the folder has every acknowledged update, a restart replays them"
_REQUEST_HINT = "nothing was changed and the server goes on; whoever asks may speak another version of weft"
LOG_LIMIT_BYTES = 1 << 30  # a longer log is made needless by a snapshot of its own accord


class Server:
    def __init__(
        self,
        *,
        index: int,
        spec: NodeSpec,
        folder: Path | None,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.index, self.folder = index, folder
        self.figures = Figures()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._defect = ""
        self._log, self._state, self._last = _opened(folder, spec)
        self._snapshots = (
            None
            if folder is None
            else Snapshots(folder, self._state, self._log, self._changed, lambda: self._last, self._settle)
        )
        if self._snapshots is not None and adopt(self._state, spec):
            self._snapshots.take(incremental=False)
        self._state.spec = spec
        self._listener = Listener(self._serve, token=token, host=host, port=port)

    def start(self) -> Endpoint:
        return self._listener.start()

    def stop(self) -> None:
        with self._changed:
            if self._is_stopping:
                return
            self._is_stopping = True
            self._changed.notify_all()
        self._listener.stop()
        with self._changed:
            if self._log is not None:
                self._log.close()

    def _serve(self, connection: socket.socket, reader: FrameReader) -> None:
        rows = _Rows()
        while True:
            frame = reader.read(connection)
            try:
                answer = self._answer(frame, connection, rows)
            except WireError:
                raise  # the two do not understand each other: the connection ends
            except WeftError as error:
                answer = control(Op.ERROR, error.as_dict())
            except OSError:
                raise
            except Exception as error:  # told in full, or its client would ask again and again; others are served
                told = f"server {self.index} could not answer: {type(error).__name__}: {error}"
                answer = control(Op.ERROR, RunError(told, hint=_REQUEST_HINT).as_dict())
            send_frame(connection, answer)

    def _answer(self, frame: Frame, connection: socket.socket, rows: _Rows) -> Frame:
        if frame.op == Op.PULL:
            self._await_gate(frame.unit, connection)
            return self._read(frame.sections, rows, reader=frame.unit)
        if frame.op in (Op.PUSH, Op.EXCHANGE, Op.ASSIGN, Op.DELETE):
            answer = self._change(frame)
            return self._read(frame.tables, rows) if frame.op == Op.EXCHANGE else answer
        if frame.op == Op.ROWS:
            return self._range(frame)
        if frame.op == Op.CONTROL:
            return control(Op.OK, self._control(frame.json()))
        raise WireError(f"operation {frame.op} is not for servers")

    def _await_gate(self, unit: int, connection: socket.socket) -> None:
        if self._state.is_open(unit) and not self._is_stopping:  # a step that is finished stays so: no lock
            return
        start = time.perf_counter()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopping or self._state.is_open(unit), TOLD_EVERY_S):
                    self.figures.waited_s += time.perf_counter() - start
                    break
                missing = self._state.units.watermark
            send_frame(connection, control(Op.WAITING, {"unit": unit, "missing": missing}))
        if self._is_stopping:
            raise ConnectionError("the server stops")

    def _read(self, sections: Sequence[Section], rows: _Rows, *, reader: int = NO_UNIT) -> Frame:
        found = []
        with self._changed, self.figures.busy:
            self._settle(reader=reader)
            version = len(self._state.units)
            for number, section in enumerate(sections):
                table = self._state.table(section.table)
                values = rows.get(number, section.keys.size, table.spec.dim)
                table.pull(section.keys, values)
                found.append(Section(table=section.table, values=values))
                self.figures.pulled_rows += section.keys.size
            self.figures.pulls += 1
        return Frame(op=Op.OK, sections=found, version=version)

    def _change(self, frame: Frame) -> Frame:
        """In the log, then applied: once, however often it is sent."""
        with self._changed, self.figures.busy:
            self._require_alive()
            self._state.require_fitting(frame)
            if not self._state.is_new(frame):
                self.figures.repeated += 1
                number, staleness = self._last, 0  # the first one's record is this one or an earlier one
            else:
                number, staleness = self._change_once(frame)
            version = len(self._state.units)
        self._wait_synced(number)
        self._shorten_log()
        return Frame(op=Op.OK, version=version, sequence=staleness)

    def _change_once(self, frame: Frame) -> tuple[int, int]:
        """The number of its record, and its staleness."""
        self._state.require_room(frame)
        staleness, lr_scale = self._state.lr_scale_of(frame)
        number = self._append_and_apply(frame._replace(lr_scale=float(np.float32(lr_scale))))
        self.figures.pushes += 1
        self.figures.pushed_rows += sum(section.keys.size for section in frame.tables)
        if frame.unit != NO_UNIT:
            self.figures.staleness[staleness] += 1
            self._changed.notify_all()
        return number, staleness

    def _wait_synced(self, number: int) -> None:
        """Before anything is acknowledged, and outside the lock: pushes that come meanwhile share the next sync."""
        if self._log is not None:
            self._log.wait_synced(number)

    def _append_and_apply(self, frame: Frame) -> int:
        number = self._append(frame)
        self._make(lambda: self._state.apply(frame, number))
        return number

    def _settle(self, *, reader: int = NO_UNIT) -> None:
        """Before anything is read: a complete step's update, which is in the log, is made by now."""
        self._require_sound()
        self._make(lambda: self._state.settle(reader=reader))

    def _make(self, change: Callable[[], None]) -> None:
        """What is in the log already: if it fails, memory lacks what the log has, and nothing may follow it."""
        try:
            change()
        except Exception as error:
            self._defect = f"server {self.index} failed: {type(error).__name__}: {error}"
            raise RunError(self._defect, hint=_DEFECT_HINT) from error

    def _append(self, frame: Frame) -> int:
        if self._last >= MAX_NUMBER:
            raise LogError(
                "the server has made 2**32 changes, the most that rows can tell apart", hint="export, reload"
            )
        if self._log is not None:
            self._last = self._log.append(int(frame.op), bytes(frame.head()), frame.body)
        else:
            self._last += 1
        return self._last

    def _shorten_log(self) -> None:
        log, snapshots = self._log, self._snapshots
        if log is None or snapshots is None or log.written_bytes < max(LOG_LIMIT_BYTES, self._table_bytes()):
            return
        log.written_bytes = 0  # one thread is enough
        threading.Thread(target=self._snapshot_quietly, daemon=True).start()

    def _snapshot_quietly(self) -> None:
        with contextlib.suppress(WeftError):  # the log still has everything
            self._snapshot(incremental=False)

    def _range(self, frame: Frame) -> Frame:
        """Keys and rows of the slots from the first key up to the second."""
        if len(frame.sections) != 1 or frame.sections[0].keys.size != 2:
            raise WireError("a range of slots is of one table and has two ends")
        section = frame.sections[0]
        table = self._state.table(section.table)
        with self._changed:
            self._settle()
            records = table.records(*(int(end) for end in section.keys))
            slots = table.num_slots
        keys, values = np.array(records["key"]), np.array(records["values"]).reshape(-1, table.spec.dim)
        return Frame(op=Op.OK, sections=[Section(table=section.table, keys=keys, values=values)], version=slots)

    def _control(self, fields: dict[str, Any]) -> dict[str, Any]:
        verb = fields.get("verb")
        if verb == "create":
            return {"table": self.create(parse(TableSpec, fields["spec"], source="the table"))}
        if verb == "snapshot":
            return {"number": self._snapshot(incremental=bool(fields.get("incremental")))}
        if verb == "shrink":
            return {"dropped": self._shrink(self._named(fields))}
        if verb == "hot":
            with self._changed:
                keys, counts = self._state.tables[self._named(fields)].hot(int(fields["top"]))
            return {"keys": keys.tolist(), "counts": counts.tolist()}
        if verb == "stats":
            return self.stats()
        raise WireError(f"a server has no verb {verb!r}")

    def stats(self) -> dict[str, Any]:
        with self._changed:
            tables = [
                {"name": table.spec.name, "rows": table.num_rows, "bytes": table.nbytes} for table in self._state.tables
            ]
            units = self._state.units.as_dict()
            waiting = sorted(self._state.shares)
        told = {"index": self.index, "tables": tables, "units": units["watermark"], "units_above": units["above"]}
        strangers = {"refused": self._listener.num_refused, "hung_up": self._listener.num_hung_up}
        record = {"log_number": self._last, "waiting_shares": waiting}
        return {**told, **self.figures.as_dict(), **strangers, **record}

    def hold(self, table: Table) -> None:
        """Takes a table that was filled elsewhere, in the place of its own; the log does not know what is in it."""
        with self._changed:
            number = self._state.number_of(table.spec)
            if number is None:
                raise TableError(f"there is no table {table.spec.name!r}", hint="create it first")
            self._state.tables[number] = table

    def retire_log(self) -> None:
        """As after a snapshot: what is in the log is needed no more. For measurements, which have none."""
        with self._changed:
            if self._log is not None:
                self._log.retire(before=self._log.next_number)

    def create(self, spec: TableSpec) -> int:
        with self._changed:
            self._require_alive()
            number = self._state.number_of(spec)
            if number is None:
                self._state.require_possible(spec)
                frame = create_frame(spec)
                self._append_and_apply(frame._replace(body=np.frombuffer(frame.text, np.uint8)))
                number = len(self._state.tables) - 1
            record = self._last
        self._wait_synced(record)
        return number

    def _shrink(self, number: int) -> int:
        """What goes is decided now and logged by key, so that replay drops the very same rows."""
        with self._changed:
            self._require_alive()
            self._settle()
            table = self._state.tables[number]
            keys = table.victims(table.spec.eviction, clock=self._last)
            if keys.size:
                frame = Frame(op=Op.DELETE, sections=[Section(table=number, keys=keys)], body=keys.view(np.uint8))
                self._append_and_apply(frame)
            record = self._last
        self._wait_synced(record)
        return int(keys.size)

    def _snapshot(self, *, incremental: bool) -> int:
        if self._snapshots is None:
            raise LogError("this server has no folder to keep snapshots in", hint="give it one")
        return self._snapshots.take(incremental=incremental)

    def _named(self, fields: dict[str, Any]) -> int:
        names = [table.spec.name for table in self._state.tables]
        if fields.get("table") not in names:
            raise TableError(f"there is no table {fields.get('table')!r}", hint=f"tables: {', '.join(names) or 'none'}")
        return names.index(str(fields["table"]))

    def _table_bytes(self) -> int:
        return sum(table.nbytes for table in self._state.tables)

    def _require_alive(self) -> None:
        self._require_sound()
        if self._is_stopping:
            raise ServerLostError("the server stops")

    def _require_sound(self) -> None:
        if self._defect:  # a snapshot would make the log needless that alone has everything
            raise RunError(self._defect, hint=_DEFECT_HINT)


class _Rows:
    """Memory for a connection's answers, used again: fresh pages for every answer would cost more than the copy."""

    def __init__(self) -> None:
        self._memory: dict[int, NDArray[np.float32]] = {}

    def get(self, number: int, count: int, dim: int) -> NDArray[np.float32]:
        if number not in self._memory or self._memory[number].size < count * dim:
            self._memory[number] = np.empty(count * dim + count * dim // 4, np.float32)
        return self._memory[number][: count * dim].reshape(count, dim)


def _opened(folder: Path | None, spec: NodeSpec) -> tuple[Log | None, State, int]:
    if folder is None:
        return None, State(spec=spec), 0
    (folder / LOG).mkdir(parents=True, exist_ok=True)
    state, last = restore(folder, spec, is_live=True)
    keep_spec(folder, state.spec)
    if spec.durability == "none":
        return None, state, last
    return Log(folder / LOG, first=last + 1, sync=spec.durability == "disk"), state, last
