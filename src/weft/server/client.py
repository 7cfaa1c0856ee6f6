"""`Client`: rows of tables that lie on several servers. Pull, push, exchange; each server is asked at the same time.

A key's server follows from its hash alone. A lost server is looked for until `timeout_s` and asked again; a push
carries its unit, or this client's sequence number, so that a server which had it already applies it no second time.
Not for several threads: give each a client of its own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.core.errors import ServerLostError, TableError, WeftError, WireError, error_from_dict
from weft.core.table_spec import TableSpec
from weft.server.row_memory import RowMemory
from weft.server.table.coalesce import coalesce
from weft.server.table.hashing import NUM_BUCKETS, split
from weft.server.wire.endpoint import Endpoint
from weft.server.wire.frame import NO_UNIT, UNITS, Frame, Op, Section, control, send_frame
from weft.server.wire.handshake import connect_known
from weft.server.wire.reader import FrameReader

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Find = Callable[[int], Endpoint]  # raises LookupError while that server is down

SILENCE_S = 30.0  # a server that waits says so every few seconds: a longer silence is a server that hangs
_LEAST_SILENCE_S = 10.0  # a shorter one would take a server that waits for one that hangs
_RETRY_S = 0.05
_FRESH = 2**63  # the version of a push that no pull belongs to: never stale
_SLOTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Pulled:
    rows: dict[str, Rows]
    versions: tuple[int, ...]  # of each server, to be given to the push
    waited_for: int = -1  # the unit that held this pull up longest; -1: none


@dataclass(frozen=True, kw_only=True)
class Pushed:
    staleness: tuple[int, ...]  # units that each server applied since the pull


def server_of_bucket(num_servers: int) -> Keys:
    """Which server has which of the NUM_BUCKETS buckets: ranges of nearly equal length."""
    return np.arange(NUM_BUCKETS, dtype=np.int64) * num_servers // NUM_BUCKETS


class Client:
    def __init__(self, find: Find, *, num_servers: int, token: str, client_id: int, timeout_s: float = 60.0) -> None:
        """`find(i)` gives server i's present endpoint. `client_id`: above 0, and never used before in this job."""
        self._links = [_Link(index, find, token, timeout_s) for index in range(num_servers)]
        self._buckets = server_of_bucket(num_servers)
        self._client_id, self._sequence = client_id, 0
        self._memory = RowMemory()
        self._specs: dict[str, TableSpec] = {}
        self._numbers: dict[str, list[int]] = {}

    def create(self, spec: TableSpec) -> None:
        fields = {"verb": "create", "spec": spec.model_dump(mode="json")}
        self._numbers[spec.name] = [int(answer["table"]) for answer in self._ask_all(fields)]
        self._specs[spec.name] = spec

    def pull(self, wanted: Mapping[str, Keys], *, unit: int | None = None) -> Pulled:
        """Rows in the order of the keys. `unit`: waits until its step may read; None reads at once."""
        plans = [self._plan(name, keys) for name, keys in wanted.items()]
        asked = NO_UNIT if unit is None else unit
        exchanges = [
            _Exchange(Frame(Op.PULL, [plan.section(server) for plan in plans], unit=asked), self._places(plans, server))
            for server in range(len(self._links))
        ]
        answers = self._exchange(exchanges)
        versions, waited_for = [answer.version for answer in answers], [each.waited_for for each in exchanges]
        return Pulled(rows=_merged(plans, exchanges), versions=tuple(versions), waited_for=max(waited_for, default=-1))

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
        """Sums of gradients over `weight` samples. `unique`: the keys of each table are known to differ."""
        numbers = {"unit": NO_UNIT if unit is None else unit, "weight": weight, "lr_scale": lr_scale}
        frames = self._frames(Op.PUSH, gradients, unique=unique, versions=versions, **numbers)
        answers = self._exchange([_Exchange(frame=frame) for frame in frames])
        return Pushed(staleness=tuple(answer.sequence for answer in answers))

    def exchange(self, deltas: Mapping[str, tuple[Keys, Rows]], *, units: Sequence[int] = ()) -> dict[str, Rows]:
        """Adds the differences to the rows and answers with them as they are then.

        `units`: what the differences were learnt from. A server that has all of them adds nothing; one that has some
        refuses, as differences cannot be taken apart: WorkerError.
        """
        plans = [self._plan(name, keys) for name, (keys, _) in deltas.items()]
        frames = self._frames(Op.EXCHANGE, deltas, unique=True)
        if units:
            listed = Section(table=UNITS, keys=np.array(units, np.int64))
            frames = [frame._replace(sections=[*frame.sections, listed]) for frame in frames]
        exchanges = [_Exchange(frame, self._places(plans, server)) for server, frame in enumerate(frames)]
        self._exchange(exchanges)
        return _merged(plans, exchanges)

    def assign(self, table: str, keys: Keys, values: Rows, *, only_absent: bool = True) -> None:
        frames = self._frames(Op.ASSIGN, {table: (keys, values)}, unique=True, weight=1.0 if only_absent else 0.0)
        self._exchange([_Exchange(frame=frame) for frame in frames])

    def delete(self, table: str, keys: Keys) -> None:
        frames = self._frames(Op.DELETE, {table: (keys, None)}, unique=True)
        self._exchange([_Exchange(frame=frame) for frame in frames])

    def shrink(self, table: str) -> int:
        """Drops what the table's eviction says; returns how many rows went."""
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
        """Everything in the table, piece by piece; rows that are made meanwhile may be missing."""
        for link, number in zip(self._links, self._numbers_of(table), strict=True):
            start, slots = 0, 1
            while start < slots:
                ends = np.array([start, start + _SLOTS], np.int64)
                frame = Frame(op=Op.ROWS, sections=[Section(table=number, keys=ends)])
                answer = link.exchange(_Exchange(frame=frame))
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
        """One frame a server, an empty one too: a server counts units by what it is told."""
        self._sequence += 1
        plans = []
        for name, (keys, rows) in given.items():
            if rows is not None:
                rows = self._checked(name, keys, rows)
                keys, rows = (keys, rows) if unique else coalesce(_as_keys(keys), rows)
            plans.append(self._plan(name, keys, rows))
        return [
            Frame(
                op=op,
                sections=[plan.section(server) for plan in plans],
                client=self._client_id,
                sequence=self._sequence,
                version=_FRESH if versions is None else versions[server],
                **numbers,
            )
            for server in range(len(self._links))
        ]

    def _places(self, plans: Sequence[_Plan], server: int) -> list[Rows]:
        """Room for the rows that this server answers with."""
        return [self._memory.rows(plan.starts[server + 1] - plan.starts[server], plan.dim) for plan in plans]

    def _plan(self, name: str, keys: Keys, values: Rows | None = None) -> _Plan:
        dim, numbers, keys = self._spec(name).dim, self._numbers[name], _as_keys(keys)
        if len(self._links) == 1:
            return _Plan(name, numbers, dim, keys, values, None, [0, keys.size])
        order, starts = split(keys, self._buckets, len(self._links))
        return _Plan(name, numbers, dim, keys[order], None if values is None else values[order], order, starts.tolist())

    def _checked(self, name: str, keys: Keys, rows: Rows) -> Rows:
        found = np.ascontiguousarray(rows, np.float32)
        if found.shape != (len(keys), self._spec(name).dim):
            raise TableError(
                f"table {name!r}: rows of shape {found.shape} for {len(keys)} keys of {self._spec(name).dim} columns",
                hint="give one row for each key",
            )
        return found

    def _spec(self, name: str) -> TableSpec:
        if name not in self._specs:
            raise TableError(f"table {name!r} was not created by this client", hint="call create(spec) first")
        return self._specs[name]

    def _numbers_of(self, name: str) -> list[int]:
        self._spec(name)
        return self._numbers[name]

    def _ask_all(self, fields: dict[str, Any]) -> list[dict[str, Any]]:
        asked = [_Exchange(frame=control(Op.CONTROL, fields)) for _ in self._links]
        return [answer.json() for answer in self._exchange(asked)]

    def _exchange(self, exchanges: Sequence[_Exchange]) -> list[Frame]:
        """All questions are on their way before the first answer is read."""
        for link, exchange in zip(self._links, exchanges, strict=True):
            link.begin(exchange)
        answers, failures = [], []
        for link, exchange in zip(self._links, exchanges, strict=True):
            try:
                answers.append(link.end(exchange))
            except WeftError as error:  # the others' answers must be read, or the next question would get them
                failures.append(error)
        if failures:
            raise failures[0]
        return answers


class _Plan(NamedTuple):
    """Keys of one table, and what is sent with them, in order of their servers; and the way back."""

    name: str
    numbers: Sequence[int]  # of the table, on each server
    dim: int
    keys: Keys
    values: Rows | None
    order: Keys | None  # None: as given
    starts: Sequence[int]  # of each server's keys, and their end

    def part(self, server: int) -> slice:
        return slice(self.starts[server], self.starts[server + 1])

    def section(self, server: int) -> Section:
        part = self.part(server)
        return Section(self.numbers[server], self.keys[part], None if self.values is None else self.values[part])

    def merged(self, parts: Sequence[Rows]) -> Rows:
        if self.order is None:
            return parts[0]
        found = np.empty((self.keys.size, self.dim), np.float32)
        for server, part in enumerate(parts):
            found[self.order[self.part(server)]] = part
        return found


def _merged(plans: Sequence[_Plan], exchanges: Sequence[_Exchange]) -> dict[str, Rows]:
    """The answers' rows in the order in which keys were given."""
    return {plan.name: plan.merged([each.into[place] for each in exchanges]) for place, plan in enumerate(plans)}


@dataclass
class _Exchange:
    """A question, and where the rows of its answer go."""

    frame: Frame
    into: list[Rows] = field(default_factory=list)
    waited_for: int = -1
    is_sent: bool = False


class _Link:
    """The connection to one server: opened when first used, and again whenever it is lost."""

    def __init__(self, index: int, find: Find, token: str, timeout_s: float) -> None:
        self._index, self._find, self._token, self._timeout_s = index, find, token, timeout_s
        self._connection: socket.socket | None = None
        self._reader = FrameReader()

    def exchange(self, exchange: _Exchange) -> Frame:
        self.begin(exchange)
        return self.end(exchange)

    def begin(self, exchange: _Exchange) -> None:
        if self._connection is None:
            return  # `end` connects and sends
        try:
            send_frame(self._connection, exchange.frame)
            exchange.is_sent = True
        except OSError:
            self.close()

    def end(self, exchange: _Exchange) -> Frame:
        """The answer; the question is asked again over a new connection as often as one is lost."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                if not exchange.is_sent:
                    self._connect(deadline)
                    send_frame(self._open(), exchange.frame)
                return self._answer(exchange)
            except WireError:  # the rest of what came would be taken for the next answer
                self.close()
                raise
            except OSError as error:
                self.close()
                exchange.is_sent = False
                if time.monotonic() > deadline:
                    raise self._lost(error) from None
                time.sleep(_RETRY_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection, self._reader = None, FrameReader()

    def _answer(self, exchange: _Exchange) -> Frame:
        while True:
            answer = self._reader.read(self._open(), into=exchange.into)
            if answer.op == Op.OK:
                return answer
            if answer.op == Op.ERROR:
                raise error_from_dict(answer.json())
            if answer.op != Op.WAITING:
                raise WireError(f"server {self._index} answers with operation {answer.op}")
            exchange.waited_for = int(answer.json()["missing"])

    def _connect(self, deadline: float) -> None:
        if self._connection is not None:
            return
        endpoint = self._endpoint(deadline)
        self._connection = connect_known(endpoint, self._token, peer=f"server {self._index} at {endpoint}")
        self._connection.settimeout(min(SILENCE_S, max(self._timeout_s, _LEAST_SILENCE_S)))

    def _endpoint(self, deadline: float) -> Endpoint:
        while True:
            try:
                return self._find(self._index)
            except LookupError as error:
                if time.monotonic() > deadline:
                    raise self._lost(error) from None
                time.sleep(_RETRY_S)

    def _open(self) -> socket.socket:
        if self._connection is None:
            raise ConnectionError("not connected")
        return self._connection

    def _lost(self, error: Exception) -> ServerLostError:
        why = "it does not answer" if isinstance(error, TimeoutError) else error
        return ServerLostError(
            f"server {self._index} did not come back within {self._timeout_s:g} s: {why}",
            hint="its folder has every acknowledged update; go on with --resume",
        )


def _as_keys(keys: Any) -> Keys:
    return np.ascontiguousarray(keys, np.int64).reshape(-1)
