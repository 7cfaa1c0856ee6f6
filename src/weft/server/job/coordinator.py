"""The coordinator: endpoints of servers, leases of units, reports of workers. It lives in the driver's process.

Workers and servers reach it over the control channel; the driver calls it directly. It holds no rows. Verbs:

    join(name)                      returns the rank of a worker and the assignment
    next(worker, finished, held)    reports units, returns the next: {unit} | {settle} | {wait} | {end}
    beat(worker)                    heartbeat
    leave(worker)                   returns its units
    fail(who, error)
    serve()                         returns the assignment
    register(server, host, port), find(server)
    status()                        for observers of the run

At an evaluation or a snapshot the leases stop at that step (`hold`) until the driver resumes them (`release`), so that
the state of a sync run at a boundary is deterministic.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from weft.core.errors import WeftError, WireError, WorkerError, error_from_dict
from weft.server.units import Leases, UnitReport
from weft.server.wire.sockets import Endpoint

WAIT_S = 2.0  # a worker without a unit asks again after this time
_VERBS = ("join", "next", "beat", "leave", "fail", "serve", "register", "find", "status")


class Coordinator:
    def __init__(self, *, assignment: dict[str, Any], clock: Callable[[], float] = time.monotonic) -> None:
        """`assignment`: everything that servers and workers must know, as JSON."""
        self._assignment, self._clock = assignment, clock
        self._changed = threading.Condition()
        self._leases: Leases | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._ranks: dict[str, int] = {}  # by name: a worker that rejoins has its old rank
        self._present: dict[str, int] = {}  # workers that joined and were not lost: the number of their join
        self._is_ending = False
        self._num_joins = 0
        self.client_id = secrets.randbits(60) + 1  # of the driver; workers have the numbers after it
        self._reports: list[UnitReport] = []
        self.failure: WeftError | None = None
        self.workers: dict[str, dict[str, float]] = defaultdict(lambda: {"units": 0, "compute_s": 0.0, "wait_s": 0.0})
        self.events: list[dict[str, Any]] = []

    # -- called by the driver

    def begin(self, leases: Leases) -> None:
        with self._changed:
            self._leases = leases
            self._changed.notify_all()

    def release(self, hold: int) -> None:
        """Units below `hold` may be leased."""
        with self._changed:
            self._running().hold = hold
            self._changed.notify_all()

    def stop_early(self) -> int:
        """Leases at most one more step; returns the unit at which the run ends, between two steps."""
        with self._changed:
            leases = self._running()
            # Not the current step: its last units may have been leased without the order to save.
            step = max(leases.highest, leases.done - 1) // leases.shares + 2
            leases.end = leases.hold = min(leases.end, leases.hold, step * leases.shares)
            self._changed.notify_all()
            return leases.end

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def take_reports(self, *, timeout_s: float) -> tuple[list[UnitReport], int]:
        """New reports, awaited up to `timeout_s`, and the watermark; expires the leases of silent workers.

        Both are read at one moment: a later watermark would count units whose reports have not been taken.
        """
        with self._changed:
            if not self._reports and self.failure is None:
                self._changed.wait(timeout_s)
            for worker in self._running().expire():
                self._record("silent", worker)
                self._changed.notify_all()
            reports, self._reports = self._reports, []
            return reports, self._running().done

    def lost(self, name: str) -> None:
        """A worker has ended: its units are leased to others. Re-entrant, as the lock of a Condition is."""
        with self._changed:
            self._drop(name)
            self._present.pop(name, None)
            self._record("worker lost", name)
            self._changed.notify_all()

    def forget_server(self, server: int) -> None:
        with self._changed:
            self._endpoints.pop(server, None)
            self._record("server lost", str(server))

    def server_endpoint(self, server: int) -> Endpoint:
        with self._changed:
            if server not in self._endpoints:
                raise LookupError(f"server {server} has not registered")
            return self._endpoints[server]

    def wait_for_servers(self, count: int, *, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._endpoints) >= count or self.failure is not None, timeout_s)
            return len(self._endpoints) >= count

    # -- called over the control channel: one method per verb

    def answer(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        if verb not in _VERBS:
            raise WireError(f"the coordinator has no verb {verb!r}")
        with self._changed:
            found: dict[str, Any] | None = getattr(self, f"_{verb}")(**fields)
            return found or {}

    def _serve(self) -> dict[str, Any]:
        return self._assignment

    def _join(self, name: str) -> dict[str, Any]:
        if name in self._present:  # Ray restarted it, and nothing else reports that
            self.lost(name)
        self._drop(name)
        rank = self._ranks.setdefault(name, len(self._ranks))
        self._num_joins += 1
        self._present[name] = self._num_joins
        self._record("worker joined", name)
        # A client id is never reused: servers would take the first pushes of a new worker for repeated ones.
        client_id = self.client_id + self._num_joins
        return {**self._assignment, "rank": rank, "client_id": client_id, "joined": self._num_joins}

    def _next(
        self, worker: str, finished: list[dict[str, Any]], held: int, joined: int | None = None
    ) -> dict[str, Any]:
        self._take(worker, finished)
        deadline = self._clock() + WAIT_S
        while True:
            # A request that waits here outlives its worker. A unit leased to it would be lost: a worker that rejoins
            # under the name keeps the lease alive and does not know of it.
            if joined is not None and self._present.get(worker) != joined:
                return {"end": True}
            answer = self._offer(worker, held)
            rest_s = deadline - self._clock()
            if answer is not None or rest_s <= 0:
                return answer or {"wait": True}
            self._changed.wait(rest_s)

    def _offer(self, worker: str, held: int) -> dict[str, Any] | None:
        leases = self._leases
        if self._is_ending and not held:
            return {"end": True}
        rank = self._ranks.get(worker, 0)
        unit = None if leases is None or self._is_ending else leases.lease(worker, rank=rank, held=held)
        if leases is not None and unit is not None:
            is_last = unit // leases.shares + 1 == min(leases.hold, leases.end) // leases.shares
            return {"unit": unit, "save": is_last and unit % leases.shares == 0, "alone": unit in leases.redone}
        return {"settle": True} if held else None

    def _take(self, worker: str, finished: list[dict[str, Any]]) -> None:
        for fields in finished:
            report = UnitReport(**{**fields, "staleness": tuple(fields.get("staleness", ()))})
            if not self._running().finish(report.unit):
                continue
            self._reports.append(report)
            figures = self.workers[worker]
            figures["units"] += 1
            figures["compute_s"] += report.compute_s
            figures["wait_s"] += report.wait_s
        if finished:
            self._changed.notify_all()

    def _beat(self, worker: str) -> None:
        if self._leases is not None:
            self._leases.beat(worker)

    def _leave(self, worker: str) -> None:
        self._drop(worker)

    def _fail(self, who: str, error: dict[str, str | int]) -> None:
        if self.failure is None:
            cause = error_from_dict(error)
            is_input = cause.exit_code == 2  # keeps its own class and code
            self.failure = cause if is_input else WorkerError(f"{who}: {cause.message}", hint=cause.hint)
        self._changed.notify_all()

    def _register(self, server: int, host: str, port: int) -> None:
        if server in self._endpoints:  # Ray restarted it, and nothing else reports that
            self._record("server lost", str(server))
        self._endpoints[server] = Endpoint(host, port)
        self._record("server up", str(server), host=host)
        self._changed.notify_all()

    def _find(self, server: int) -> dict[str, Any]:
        endpoint = self._endpoints.get(server)
        return {} if endpoint is None else {"host": endpoint.host, "port": endpoint.port}

    def _status(self) -> dict[str, Any]:
        endpoints = {str(server): [end.host, end.port] for server, end in sorted(self._endpoints.items())}
        done = 0 if self._leases is None else self._leases.done
        return {"endpoints": endpoints, "workers": self.worker_rows(), "done": done}

    def worker_rows(self) -> list[dict[str, Any]]:
        return [{"name": name, **figures} for name, figures in sorted(self.workers.items())]

    def _drop(self, worker: str) -> None:
        if self._leases is not None and self._leases.drop(worker):
            self._changed.notify_all()

    def _record(self, event: str, who: str, **more: str) -> None:
        self.events.append({"time": time.time(), "event": event, "who": who, **more})

    def _running(self) -> Leases:
        if self._leases is None:
            raise WireError("the run has not begun")
        return self._leases
