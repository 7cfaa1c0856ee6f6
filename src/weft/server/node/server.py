"""One parameter server: tables and their log behind a socket.

    PULL     waits for the gate, reads rows under the lock, answers
    PUSH     is it new? -> log -> apply -> acknowledge; a repeated push is acknowledged and not applied
    EXCHANGE as PUSH, and answers with the rows as they are then

One lock orders log records and changes. Kernels, log writes and sockets release the GIL, so connections overlap
everywhere else.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.config import parse
from weft.core.errors import LogError, RunError, ServerLostError, TableError, WeftError, WireError
from weft.core.table_spec import TableSpec
from weft.server.durable.log import Log
from weft.server.node.snapshots import LOG, Snapshots, adopt, keep_spec, restore
from weft.server.node.state import MAX_NUMBER, NodeSpec, State, create_frame
from weft.server.table.table import Table
from weft.server.wire.frame import NO_UNIT, Frame, FrameReader, Op, TableSection, control, send_frame
from weft.server.wire.listener import SocketListener
from weft.server.wire.row_memory import RowMemory
from weft.server.wire.sockets import Endpoint

REPORT_EVERY_S = 5.0  # between reports to a client that waits at the gate
_DEFECT_HINT = "this is a defect; the folder has every acknowledged update, a restart replays them"
_REQUEST_HINT = "nothing was changed and the server continues; the client may be another version of weft"
LOG_LIMIT_BYTES = 1 << 30  # a longer log is replaced by a snapshot


@dataclass
class Figures:
    """Counters of one server. `with figures:` adds to the busy time; one thread at a time, under the server's lock."""

    started_s: float = field(default_factory=time.monotonic)
    pulled_rows: int = 0
    pushed_rows: int = 0
    pulls: int = 0
    pushes: int = 0
    repeated: int = 0  # pushes that had been applied before
    waited_s: float = 0.0  # pulls at the gate
    busy_s: float = 0.0  # inside tables and the log
    staleness: Counter[int] = field(default_factory=Counter)
    _since: float = 0.0

    def __enter__(self) -> None:
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.busy_s += time.perf_counter() - self._since

    def as_dict(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("staleness", "started_s", "_since")}
        histogram = {str(tau): count for tau, count in sorted(self.staleness.items())}
        return {**plain, "up_s": time.monotonic() - self.started_s, "staleness": histogram}


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
        self._snapshots: Snapshots | None = None
        if folder is not None:
            self._snapshots = Snapshots(
                folder, self._state, self._log, self._changed, lambda: self._last, self._apply_pending
            )
            if adopt(self._state, spec):
                self._snapshots.take(incremental=False)
        self._state.spec = spec
        self._listener = SocketListener(self._serve, token=token, host=host, port=port)

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
        memory = RowMemory()
        while True:
            # No variable holds the answer: its memory is free for the next one.
            send_frame(connection, self._answer_or_error(reader.read(connection), connection, memory))

    def _answer_or_error(self, frame: Frame, connection: socket.socket, memory: RowMemory) -> Frame:
        try:
            return self._answer(frame, connection, memory)
        except (WireError, OSError):
            raise  # the connection ends
        except WeftError as error:
            return control(Op.ERROR, error.as_dict())
        except Exception as error:  # answered, or the client would retry without end; other clients are served
            found = f"server {self.index} could not answer: {type(error).__name__}: {error}"
            return control(Op.ERROR, RunError(found, hint=_REQUEST_HINT).as_dict())

    def _answer(self, frame: Frame, connection: socket.socket, memory: RowMemory) -> Frame:
        if frame.op == Op.PULL:
            self._await_gate(frame.unit, connection)
            return self._read(frame.sections, memory, reader=frame.unit)
        if frame.op in (Op.PUSH, Op.EXCHANGE, Op.ASSIGN, Op.DELETE):
            answer = self._change(frame)
            return self._read(frame.tables, memory) if frame.op == Op.EXCHANGE else answer
        if frame.op == Op.ROWS:
            return self._range(frame)
        if frame.op == Op.CONTROL:
            return control(Op.OK, self._control(frame.json()))
        raise WireError(f"operation {frame.op} is not for servers")

    def _await_gate(self, unit: int, connection: socket.socket) -> None:
        if self._state.is_open(unit) and not self._is_stopping:  # a finished step stays finished: no lock
            return
        start = time.perf_counter()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._is_stopping or self._state.is_open(unit), REPORT_EVERY_S):
                    self.figures.waited_s += time.perf_counter() - start
                    break
                missing = self._state.units.watermark
            send_frame(connection, control(Op.WAITING, {"unit": unit, "missing": missing}))
        if self._is_stopping:
            raise ConnectionError("the server stops")

    def _read(self, sections: Sequence[TableSection], memory: RowMemory, *, reader: int = NO_UNIT) -> Frame:
        found = []
        with self._changed, self.figures:
            self._apply_pending(reader=reader)
            version = len(self._state.units)
            for section in sections:
                table = self._state.table(section.table)
                values = memory.rows(section.keys.size, table.spec.dim)
                table.pull(section.keys, values)
                found.append(TableSection(table=section.table, values=values))
                self.figures.pulled_rows += section.keys.size
            self.figures.pulls += 1
        return Frame(op=Op.OK, sections=found, version=version)

    def _change(self, frame: Frame) -> Frame:
        """Logged, then applied: once, however often it is sent."""
        with self._changed, self.figures:
            self._require_alive()
            self._state.require_fitting(frame)
            if not self._state.is_new(frame):
                self.figures.repeated += 1
                number, staleness = self._last, 0  # the record of the first one is this one or an earlier one
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
        """Before an acknowledgement, and outside the lock: pushes that arrive meanwhile share the next sync."""
        if self._log is not None:
            self._log.wait_synced(number)

    def _append_and_apply(self, frame: Frame) -> int:
        if self._last >= MAX_NUMBER:
            raise LogError(
                "the server has made 2**32 changes, the most that the record numbers in rows can count",
                hint="export, reload",
            )
        if self._log is not None:
            self._last = self._log.append(int(frame.op), bytes(frame.head()), frame.body)
        else:
            self._last += 1
        number = self._last
        self._guard(lambda: self._state.apply(frame, number))
        return number

    def _apply_pending(self, *, reader: int = NO_UNIT) -> None:
        """Before every read: apply the logged update of a complete step."""
        self._require_sound()
        self._guard(lambda: self._state.apply_pending(reader=reader))

    def _guard(self, change: Callable[[], None]) -> None:
        """Around a logged change: if it fails, memory lacks a record of the log, and the server accepts no other."""
        try:
            change()
        except Exception as error:
            self._defect = f"server {self.index} failed: {type(error).__name__}: {error}"
            raise RunError(self._defect, hint=_DEFECT_HINT) from error

    def _shorten_log(self) -> None:
        log, limit_bytes = self._log, max(LOG_LIMIT_BYTES, sum(table.nbytes for table in self._state.tables))
        if log is None or log.written_bytes < limit_bytes:
            return
        log.written_bytes = 0  # one thread is enough

        def snapshot() -> None:
            with contextlib.suppress(WeftError):  # the log still has everything
                self._snapshot(incremental=False)

        threading.Thread(target=snapshot, daemon=True).start()

    def _range(self, frame: Frame) -> Frame:
        """Keys and rows of the slots from the first key up to the second."""
        if len(frame.sections) != 1 or frame.sections[0].keys.size != 2:
            raise WireError("a range of slots has one table and two ends")
        section = frame.sections[0]
        table = self._state.table(section.table)
        with self._changed:
            self._apply_pending()
            records = table.records(*(int(end) for end in section.keys))
            slots = table.num_slots
        keys, values = np.array(records["key"]), np.array(records["values"]).reshape(-1, table.spec.dim)
        return Frame(op=Op.OK, sections=[TableSection(table=section.table, keys=keys, values=values)], version=slots)

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
        return {
            "index": self.index,
            "tables": tables,
            "units": units["watermark"],
            "units_above": units["above"],
            **self.figures.as_dict(),
            "refused": self._listener.num_refused,
            "hung_up": self._listener.num_hung_up,
            "log_number": self._last,
            "waiting_shares": waiting,
        }

    def hold(self, table: Table) -> None:
        """Replaces a table by one that was filled elsewhere; its rows are not in the log. For benchmarks."""
        with self._changed:
            self._state.tables[self._named({"table": table.spec.name})] = table

    def retire_log(self) -> None:
        """Frees the log as a snapshot does. For benchmarks, which take none."""
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
        """The keys are chosen now and logged, so that replay drops the same rows."""
        with self._changed:
            self._require_alive()
            self._apply_pending()
            table = self._state.tables[number]
            keys = table.victims(table.spec.eviction, clock=self._last)
            if keys.size:
                frame = Frame(op=Op.DELETE, sections=[TableSection(table=number, keys=keys)], body=keys.view(np.uint8))
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

    def _require_alive(self) -> None:
        self._require_sound()
        if self._is_stopping:
            raise ServerLostError("the server stops")

    def _require_sound(self) -> None:
        if self._defect:  # a snapshot would free the log, which alone has every change
            raise RunError(self._defect, hint=_DEFECT_HINT)


def _opened(folder: Path | None, spec: NodeSpec) -> tuple[Log | None, State, int]:
    if folder is None:
        return None, State(spec=spec), 0
    (folder / LOG).mkdir(parents=True, exist_ok=True)
    state, last = restore(folder, spec, is_live=True)
    keep_spec(folder, state.spec)
    if spec.durability == "none":
        return None, state, last
    return Log(folder / LOG, first=last + 1, sync=spec.durability == "disk"), state, last
