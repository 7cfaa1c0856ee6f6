"""Load: figures of each server, worker and hot key, read from server.json. No drawing.

imbalance = max / mean over the servers: 1 is even, n means that one of n servers has all the load
the slowest worker has the most seconds of compute per unit: where steps are summed, the others wait for it
a hot key's share = updates of its row / updates that can change a row: steps where they are summed (sync), else pushes
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.report.fields import number, rows, table
from weft.report.folder import ServerFolder
from weft.report.server.facts import gate_of


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """Contents and work of one server since it started."""

    name: str
    tables: dict[str, tuple[float, float]]  # rows and bytes by table
    pulled_rows_per_s: float | None
    pushed_rows_per_s: float | None
    busy_share: float | None
    pulls: float | None
    pushes: float | None
    repeated: float | None
    up_s: float | None

    @property
    def rows(self) -> float:
        return sum(held for held, _ in self.tables.values())

    @property
    def bytes(self) -> float:
        return sum(size for _, size in self.tables.values())


@dataclass(frozen=True, kw_only=True)
class WorkerLoad:
    name: str
    units: float
    compute_s: float
    wait_s: float

    @property
    def waiting_share(self) -> float | None:
        return waiting_share([self])

    @property
    def compute_s_per_unit(self) -> float:
        return self.compute_s / self.units if self.units else 0.0


@dataclass(frozen=True, kw_only=True)
class HotKey:
    key: int
    updates: float
    share: float | None


def server_loads(folder: ServerFolder) -> list[ServerLoad]:
    return [_server_load(server, place) for place, server in enumerate(rows(folder.servers, "servers"))]


def worker_loads(folder: ServerFolder) -> list[WorkerLoad]:
    return [_worker_load(worker) for worker in rows(folder.servers, "workers")]


def hot_keys(folder: ServerFolder) -> dict[str, list[HotKey]]:
    """By table, the most pushed first."""
    total = num_updates(folder)
    found = {name: _pairs(pairs) for name, pairs in table(folder.servers, "hot_keys").items()}
    return {name: [_hot_key(*pair, total) for pair in pairs] for name, pairs in found.items() if pairs}


def update_word(folder: ServerFolder) -> str:
    """The name of the updates that change a row; a geo exchange is a push too."""
    return "steps" if gate_of(folder) == 0 else "pushes"


def num_updates(folder: ServerFolder) -> float | None:
    """How many updates can have changed a row."""
    servers, spec = rows(folder.servers, "servers"), table(folder.run, "server")
    if spec.get("mode") == "geo":  # exchanges carry no units
        return max((number(server.get("pushes")) or 0.0 for server in servers), default=0.0) or None
    units = max((number(server.get("units")) or 0.0 for server in servers), default=0.0)
    workers = number(spec.get("workers")) or 0.0
    is_summed = gate_of(folder) == 0
    return ((units / workers if workers else 0.0) if is_summed else units) or None


def imbalance(values: Sequence[float | None]) -> float | None:
    """max / mean; None for fewer than two values."""
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else 0.0
    return max(known) / mean if len(known) > 1 and mean > 0 else None


def slowest(workers: Sequence[WorkerLoad]) -> WorkerLoad | None:
    able = [worker for worker in workers if worker.compute_s_per_unit > 0]
    return max(able, key=lambda worker: worker.compute_s_per_unit) if len(able) > 1 else None


def waiting_share(workers: Sequence[WorkerLoad]) -> float | None:
    total = sum(worker.compute_s + worker.wait_s for worker in workers)
    return sum(worker.wait_s for worker in workers) / total if total > 0 else None


_SAME_NAMES = ("pulled_rows_per_s", "pushed_rows_per_s", "pulls", "pushes", "repeated", "up_s")


def _server_load(server: dict[str, Any], place: int) -> ServerLoad:
    index = server.get("index", place)
    held = {
        str(held.get("name", "?")): (number(held.get("rows")) or 0.0, number(held.get("bytes")) or 0.0)
        for held in rows(server, "tables")
    }
    return ServerLoad(
        name=f"server {index}",
        tables=held,
        busy_share=number(server.get("load")),
        **{key: number(server.get(key)) for key in _SAME_NAMES},
    )


def _worker_load(worker: dict[str, Any]) -> WorkerLoad:
    units, compute_s, wait_s = (number(worker.get(key)) or 0.0 for key in ("units", "compute_s", "wait_s"))
    return WorkerLoad(name=str(worker.get("name", "?")), units=units, compute_s=compute_s, wait_s=wait_s)


def _pairs(found: Any) -> list[tuple[int, float]]:
    pairs = [pair for pair in found if isinstance(pair, list) and len(pair) == 2] if isinstance(found, list) else []
    return [(key, count) for key, count in ((key, number(count)) for key, count in pairs) if _is_key(key) and count]


def _is_key(key: Any) -> bool:
    return isinstance(key, int) and not isinstance(key, bool) and -(2**63) <= key < 2**63


def _hot_key(key: int, updates: float, total: float | None) -> HotKey:
    """A restarted server counts from 0 and its rows do not: a share above 1 means that it is not known."""
    share = updates / total if total else None
    return HotKey(key=key, updates=updates, share=share if share is not None and share <= 1 else None)
