"""`Client`: rows of tables on several servers. Pull, push, exchange; all servers are called at the same time.

The hash of a key gives its server. A lost server is retried for `timeout_s`; a push carries its unit, or the sequence
number of this client, so a server applies it once, however often it is sent. One client per thread.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from weft.core.errors import ServerLostError, TableError, WeftError, WireError, error_from_dict
from weft.core.table_spec import TableSpec
from weft.server.arrays import Keys, Rows
from weft.server.table.coalesce import coalesce
from weft.server.table.hashing import NUM_BUCKETS, split
from weft.server.wire.frame import NO_UNIT, UNITS, Frame, FrameReader, Op, TableSection, control, send_frame
from weft.server.wire.handshake import connect_known
from weft.server.wire.row_memory import RowMemory
from weft.server.wire.sockets import Endpoint

Find = Callable[[int], Endpoint]  # raises LookupError while the server is down

SILENCE_S = 30.0  # a server in front of a closed gate reports every few seconds: a longer silence is a hang
_LEAST_SILENCE_S = 10.0  # a shorter limit would take a waiting server for one that hangs
_RETRY_S = 0.05
_FRESH = 2**63  # the version of a push without a pull: never stale
_SLOTS = 1 << 16
_NO_ANSWER = Frame(Op.OK)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    rows: dict[str, Rows]
    versions: tuple[int, ...]  # of each server, an argument of the push
    waited_for: int = -1  # the unit that delayed this pull; -1: none


@dataclass(frozen=True, kw_only=True)
class Pushed:
    staleness: tuple[int, ...]  # units that each server applied after the pull


def server_of_bucket(num_servers: int) -> Keys:
    """The server of each of the NUM_BUCKETS buckets: ranges of nearly equal length."""
    return np.arange(NUM_BUCKETS, dtype=np.int64) * num_servers // NUM_BUCKETS


class Client:
    def __init__(self, find: Find, *, num_servers: int, token: str, client_id: int, timeout_s: float = 60.0) -> None:
        """`find(i)` returns the current endpoint of server i. `client_id`: above 0, never used before in this job."""
        self._links = [_Link(index, find, token, timeout_s) for index in range(num_servers)]
        self._buckets = server_of_bucket(num_servers)
        self._client_id, self._sequence = client_id, 0
        self._memory = RowMemory()
        self._tables: dict[str, _RemoteTable] = {}

    def create(self, spec: TableSpec) -> None:
        answers = self._ask_all({"verb": "create", "spec": spec.model_dump(mode="json")})
        self._tables[spec.name] = _RemoteTable(spec.dim, [int(answer["table"]) for answer in answers])

    def pull(self, wanted: Mapping[str, Keys], *, unit: int | None = None) -> Pulled:
        """Rows in the order of the keys. `unit`: waits for the gate of its step; None reads at once."""
        splits = [self._split(name, keys) for name, keys in wanted.items()]
        asked = NO_UNIT if unit is None else unit
        frames = [Frame(Op.PULL, [each.section(link.index) for each in splits], unit=asked) for link in self._links]
        calls = self._call_all(frames, splits)
        return Pulled(
            rows=_merged(splits, calls),
            versions=tuple(call.answer.version for call in calls),
            waited_for=max((call.waited_for for call in calls), default=-1),
        )

    def push(
        self,
        gradients: Mapping[str, tuple[Keys, Rows]],
        *,
        unit: int | None = None,
        weight: float = 1.0,
        lr_scale: float = 1.0,
        versions: tuple[int, ...] | None = None,
        unique: bool = False,
    ) -> Pushed:
        """Sums of gradients over `weight` samples. `unique`: no key occurs twice in a table."""
        numbers = {"unit": NO_UNIT if unit is None else unit, "weight": weight, "lr_scale": lr_scale}
        calls = self._call_all(self._frames(Op.PUSH, gradients, unique=unique, versions=versions, **numbers))
        return Pushed(staleness=tuple(call.answer.sequence for call in calls))

    def exchange(self, deltas: Mapping[str, tuple[Keys, Rows]], *, units: Sequence[int] = ()) -> dict[str, Rows]:
        """Adds the deltas to the rows and returns the rows as they are then.

        `units`: the units that the deltas were trained on. A server that has all of them adds nothing; one that has
        some refuses with a WorkerError, since a delta of several units cannot be divided.
        """
        splits = [self._split(name, keys) for name, (keys, _) in deltas.items()]
        frames = self._frames(Op.EXCHANGE, deltas, unique=True)
        if units:
            listed = TableSection(table=UNITS, keys=np.array(units, np.int64))
            frames = [frame._replace(sections=[*frame.sections, listed]) for frame in frames]
        return _merged(splits, self._call_all(frames, splits))

    def assign(self, table: str, keys: Keys, values: Rows, *, only_absent: bool = True) -> None:
        weight = 1.0 if only_absent else 0.0
        self._call_all(self._frames(Op.ASSIGN, {table: (keys, values)}, unique=True, weight=weight))

    def delete(self, table: str, keys: Keys) -> None:
        self._call_all(self._frames(Op.DELETE, {table: (keys, None)}, unique=True))

    def shrink(self, table: str) -> int:
        """Applies the eviction rule of the table; returns the number of dropped rows."""
        return sum(int(answer["dropped"]) for answer in self._ask_all({"verb": "shrink", "table": table}))

    def snapshot(self, *, incremental: bool = False) -> None:
        self._ask_all({"verb": "snapshot", "incremental": incremental})

    def stats(self) -> list[dict[str, Any]]:
        return self._ask_all({"verb": "stats"})

    def hot(self, table: str, top: int) -> list[tuple[int, int]]:
        """The keys that were pushed most often, with their counts."""
        answers = self._ask_all({"verb": "hot", "table": table, "top": top})
        found = [pair for answer in answers for pair in zip(answer["keys"], answer["counts"], strict=True)]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))[:top]

    def rows(self, table: str) -> Iterator[tuple[Keys, Rows]]:
        """All rows of the table, piece by piece; rows that are created meanwhile may be missing."""
        for link, number in zip(self._links, self._table(table).numbers, strict=True):
            start, slots = 0, 1
            while start < slots:
                ends = np.array([start, start + _SLOTS], np.int64)
                call = _Call(Frame(op=Op.ROWS, sections=[TableSection(table=number, keys=ends)]))
                link.begin(call)
                answer = link.end(call)
                section, slots, start = answer.sections[0], answer.version, start + _SLOTS
                if section.keys.size and section.values is not None:
                    yield np.array(section.keys), np.array(section.values)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _frames(
        self,
        op: Op,
        given: Mapping[str, tuple[Keys, Rows | None]],
        *,
        unique: bool,
        versions: tuple[int, ...] | None = None,
        **numbers: Any,
    ) -> list[Frame]:
        """One frame per server, also an empty one: a server counts units by the frames it receives."""
        self._sequence += 1
        splits = []
        for name, (keys, rows) in given.items():
            if rows is not None:
                rows = self._checked(name, keys, rows)
                keys, rows = (keys, rows) if unique else coalesce(_as_keys(keys), rows)
            splits.append(self._split(name, keys, rows))
        return [
            Frame(
                op=op,
                sections=[each.section(server) for each in splits],
                client=self._client_id,
                sequence=self._sequence,
                version=_FRESH if versions is None else versions[server],
                **numbers,
            )
            for server in range(len(self._links))
        ]

    def _split(self, name: str, keys: Keys, values: Rows | None = None) -> _SplitRows:
        table, keys = self._table(name), _as_keys(keys)
        if len(self._links) == 1:
            return _SplitRows(name, table, keys, values, None, [0, keys.size])
        order, starts = split(keys, self._buckets, len(self._links))
        return _SplitRows(name, table, keys[order], None if values is None else values[order], order, starts.tolist())

    def _checked(self, name: str, keys: Keys, rows: Rows) -> Rows:
        found, dim = np.ascontiguousarray(rows, np.float32), self._table(name).dim
        if found.shape != (len(keys), dim):
            raise TableError(
                f"table {name!r}: rows of shape {found.shape} for {len(keys)} keys of {dim} columns",
                hint="give one row for each key",
            )
        return found

    def _table(self, name: str) -> _RemoteTable:
        if name not in self._tables:
            raise TableError(f"table {name!r} was not created by this client", hint="call create(spec) first")
        return self._tables[name]

    def _ask_all(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        return [call.answer.json() for call in self._call_all([control(Op.CONTROL, fields)] * len(self._links))]

    def _call_all(self, frames: Sequence[Frame], splits: Sequence[_SplitRows] = ()) -> list[_Call]:
        """Sends one frame per server before it reads the first answer. `splits`: the rows that the answers hold."""
        calls = [_Call(frame) for frame in frames]
        for link, call in zip(self._links, calls, strict=True):
            call.into = [self._memory.rows(each.count(link.index), each.table.dim) for each in splits]
            link.begin(call)
        failures = []
        for link, call in zip(self._links, calls, strict=True):
            try:
                link.end(call)
            except WeftError as error:  # the other answers must be read, or the next request would receive them
                failures.append(error)
        if failures:
            raise failures[0]
        return calls


class _RemoteTable(NamedTuple):
    dim: int
    numbers: Sequence[int]  # of the table, on each server


class _SplitRows(NamedTuple):
    """Keys of one table, and the values sent with them, sorted by server."""

    name: str
    table: _RemoteTable
    keys: Keys
    values: Rows | None
    order: Keys | None  # positions in the given order; None: unchanged
    starts: Sequence[int]  # of the keys of each server, and their end

    def count(self, server: int) -> int:
        return self.starts[server + 1] - self.starts[server]

    def section(self, server: int) -> TableSection:
        own = slice(self.starts[server], self.starts[server + 1])
        return TableSection(
            self.table.numbers[server], self.keys[own], None if self.values is None else self.values[own]
        )

    def merged(self, parts: Sequence[Rows]) -> Rows:
        if self.order is None:
            return parts[0]
        found = np.empty((self.keys.size, self.table.dim), np.float32)
        for server, part in enumerate(parts):
            found[self.order[self.starts[server] : self.starts[server + 1]]] = part
        return found


def _merged(splits: Sequence[_SplitRows], calls: Sequence[_Call]) -> dict[str, Rows]:
    """The rows of the answers in the order of the given keys."""
    return {each.name: each.merged([call.into[place] for call in calls]) for place, each in enumerate(splits)}


@dataclass
class _Call:
    """A request, its answer, and the memory for the rows of the answer."""

    frame: Frame
    into: list[Rows] = field(default_factory=list)
    answer: Frame = _NO_ANSWER
    waited_for: int = -1
    is_sent: bool = False


class _Link:
    """The connection to one server: opened at first use, and reopened whenever it is lost."""

    def __init__(self, index: int, find: Find, token: str, timeout_s: float) -> None:
        self.index = index
        self._find, self._token, self._timeout_s = find, token, timeout_s
        self._connection: socket.socket | None = None
        self._reader = FrameReader()

    def begin(self, call: _Call) -> None:
        if self._connection is None:
            return  # `end` connects and sends
        try:
            send_frame(self._connection, call.frame)
            call.is_sent = True
        except OSError:
            self.close()

    def end(self, call: _Call) -> Frame:
        """Reads the answer; repeats the request over a new connection as often as one is lost."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection = self._connection or self._connect()
                if not call.is_sent:
                    send_frame(connection, call.frame)
                call.answer = self._answer(call, connection)
                return call.answer
            except WireError:  # the rest of the stream would be read as the next answer
                self.close()
                raise
            except (OSError, LookupError) as error:
                self.close()
                call.is_sent = False
                if time.monotonic() > deadline:
                    raise self._lost(error) from None
                time.sleep(_RETRY_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._reader = None, FrameReader()

    def _answer(self, call: _Call, connection: socket.socket) -> Frame:
        while True:
            answer = self._reader.read(connection, into=call.into)
            if answer.op == Op.OK:
                return answer
            if answer.op == Op.ERROR:
                raise error_from_dict(answer.json())
            if answer.op != Op.WAITING:
                raise WireError(f"server {self.index} answers with operation {answer.op}")
            call.waited_for = int(answer.json()["missing"])

    def _connect(self) -> socket.socket:
        endpoint = self._find(self.index)
        self._connection = connect_known(endpoint, self._token, peer=f"server {self.index} at {endpoint}")
        self._connection.settimeout(min(SILENCE_S, max(self._timeout_s, _LEAST_SILENCE_S)))
        return self._connection

    def _lost(self, error: Exception) -> ServerLostError:
        why = "it does not answer" if isinstance(error, TimeoutError) else error
        return ServerLostError(
            f"server {self.index} did not come back within {self._timeout_s:g} s: {why}",
            hint="its folder has every acknowledged update; continue with --resume",
        )


def _as_keys(keys: Any) -> Keys:
    return np.ascontiguousarray(keys, np.int64).reshape(-1)
