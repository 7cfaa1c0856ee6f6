"""The coordinator: where servers are, which units are whose, what came of them. It lives in the driver's process.

Workers and servers reach it over the control channel; the driver calls it directly. It holds no rows. Verbs:

    join(name)                      a worker's number and what to train
    next(worker, finished, held)    reports units, gets the next: {unit} | {settle} | {wait} | {end}
    beat(worker)                    I am alive
    leave(worker)                   gives its units back
    fail(who, error)
    serve()                         what a server must know
    register(server, host, port), find(server)
    status()                        for who looks at the run from outside

At an evaluation or a snapshot the leases stop at that step (`hold`) until the driver lets them go on (`release`), so
that what a sync run sees there depends on nothing else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from weft.core.errors import WeftError, WireError, WorkerError, error_from_dict
from weft.server.leases import Leases
from weft.server.wire.endpoint import Endpoint

WAIT_S = 2.0  # a worker without work asks again after this time


@dataclass(frozen=True, kw_only=True)
class UnitReport:
    """What a worker says of a unit that is done."""

    unit: int
    loss_sum: float
    weight: float  # samples
    compute_s: float
    wait_s: float
    staleness: tuple[int, ...] = ()  # on each server

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Coordinator:
    def __init__(
        self, *, assignment: dict[str, Any], is_static: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`assignment`: what a worker must know, as JSON."""
        self._assignment, self._is_static, self._clock = assignment, is_static, clock
        self._changed = threading.Condition()
        self._leases: Leases | None = None
        self._endpoints: dict[int, Endpoint] = {}
        self._ranks: dict[str, int] = {}  # by name: a worker that comes back has its old one
        self._present: dict[str, int] = {}  # workers that joined and were not lost: the number of their joining
        self._is_ending = False
        self._num_joins = 0
        self.client_id = secrets.randbits(60) + 1  # of the driver; workers have the numbers after it
        self._reports: list[UnitReport] = []
        self.failure: WeftError | None = None
        self.workers: dict[str, dict[str, float]] = defaultdict(_no_figures)
        self.events: list[dict[str, Any]] = []

    # -- what the driver calls

    def begin(self, leases: Leases) -> None:
        with self._changed:
            self._leases = leases
            self._changed.notify_all()

    def release(self, hold: int) -> None:
        """Units below `hold` may go out."""
        with self._changed:
            self._running().hold = hold
            self._changed.notify_all()

    def stop_early(self) -> int:
        """No unit of a new step but one goes out; returns the unit at which the run ends, between two steps."""
        with self._changed:
            leases = self._running()
            # Not the step under way: its last units may have gone out without the order to save.
            step = max(leases.highest, leases.done - 1) // leases.shares + 2
            leases.end = leases.hold = min(leases.end, leases.hold, step * leases.shares)
            self._changed.notify_all()
            return leases.end

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def take_reports(self, *, timeout_s: float) -> tuple[list[UnitReport], int]:
        """What was done since the last time, waiting for it if need be, and the watermark; expired leases go again.

        Both of one moment: a watermark read later would count units whose reports have not been taken.
        """
        with self._changed:
            if not self._reports and self.failure is None:
                self._changed.wait(timeout_s)
            for worker in self._running().expire():
                self._note("silent", worker)
                self._changed.notify_all()
            reports, self._reports = self._reports, []
            return reports, self._running().done

    def lost(self, name: str) -> None:
        """The launcher saw a worker's process end."""
        with self._changed:
            self._lose(name)

    def forget_server(self, server: int) -> None:
        with self._changed:
            self._endpoints.pop(server, None)
            self._note("server lost", str(server))

    def server_endpoint(self, server: int) -> Endpoint:
        with self._changed:
            if server not in self._endpoints:
                raise LookupError(f"server {server} has not registered")
            return self._endpoints[server]

    def wait_for_servers(self, count: int, *, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self._endpoints) >= count or self.failure is not None, timeout_s)
            return len(self._endpoints) >= count

    # -- what the control channel calls

    def answer(self, verb: str, fields: dict[str, Any]) -> dict[str, Any]:
        handlers: dict[str, Callable[..., dict[str, Any]]] = {
            "join": self._join,
            "next": self._next,
            "beat": self._beat,
            "leave": self._leave,
            "fail": self._fail,
            "register": self._register,
            "find": self._find,
            "status": self._status,
            "serve": lambda: self._assignment,
        }
        if verb not in handlers:
            raise WireError(f"the coordinator has no verb {verb!r}")
        with self._changed:
            return handlers[verb](**fields)

    def _join(self, name: str) -> dict[str, Any]:
        if name in self._present:  # nobody else tells where Ray started it again
            self._lose(name)
        self._drop(name)
        rank = self._ranks.setdefault(name, len(self._ranks))
        self._num_joins += 1
        self._present[name] = self._num_joins
        self._note("worker joined", name)
        # A client's number is never used again: servers would take a newcomer's first pushes for repeated ones.
        client_id = self.client_id + self._num_joins
        return {**self._assignment, "rank": rank, "client_id": client_id, "joined": self._num_joins}

    def _next(
        self, worker: str, finished: list[dict[str, Any]], held: int, joined: int | None = None
    ) -> dict[str, Any]:
        self._take(worker, finished)
        deadline = self._clock() + WAIT_S
        while True:
            # A question that waits here outlives its worker. A unit given to it would be lost: whoever comes back under
            # the name keeps its lease alive and knows nothing of it.
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

    def _beat(self, worker: str) -> dict[str, Any]:
        if self._leases is not None:
            self._leases.beat(worker)
        return {}

    def _leave(self, worker: str) -> dict[str, Any]:
        self._drop(worker)
        return {}

    def _fail(self, who: str, error: dict[str, str | int]) -> dict[str, Any]:
        if self.failure is None:
            cause = error_from_dict(error)
            hint = cause.hint
            is_input = cause.exit_code == 2  # a wrong request stays what it is
            self.failure = cause if is_input else WorkerError(f"{who}: {cause.message}", hint=hint)
        self._changed.notify_all()
        return {}

    def _register(self, server: int, host: str, port: int) -> dict[str, Any]:
        if server in self._endpoints:  # nobody else tells where Ray started it again
            self._note("server lost", str(server))
        self._endpoints[server] = Endpoint(host, port)
        self._note("server up", str(server), host=host)
        self._changed.notify_all()
        return {}

    def _find(self, server: int) -> dict[str, Any]:
        endpoint = self._endpoints.get(server)
        return {} if endpoint is None else {"host": endpoint.host, "port": endpoint.port}

    def _status(self) -> dict[str, Any]:
        endpoints = {str(server): [end.host, end.port] for server, end in sorted(self._endpoints.items())}
        workers = [{"name": name, **figures} for name, figures in sorted(self.workers.items())]
        done = 0 if self._leases is None else self._leases.done
        return {"endpoints": endpoints, "workers": workers, "done": done}

    def _lose(self, name: str) -> None:
        """What it had goes to others."""
        self._drop(name)
        self._present.pop(name, None)
        self._note("worker lost", name)
        self._changed.notify_all()

    def _drop(self, worker: str) -> None:
        if self._leases is not None and self._leases.drop(worker):
            self._changed.notify_all()

    def _note(self, what: str, who: str, **more: str) -> None:
        self.events.append({"time": time.time(), "event": what, "who": who, **more})

    def _running(self) -> Leases:
        if self._leases is None:
            raise WireError("the run has not begun")
        return self._leases


def _no_figures() -> dict[str, float]:
    return {"units": 0, "compute_s": 0.0, "wait_s": 0.0}
