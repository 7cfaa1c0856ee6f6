"""A worker: asks for a unit, reads its samples and rows, forward, backward, sends gradients, asks again.

It knows no other worker. The order within a unit:

    read samples -> pull (dense and sparse rows in one round trip) -> forward -> backward of the loss SUM -> push

A unit is reported with the question for the next. A geo worker reports its units once they are exchanged: if it dies
before, somebody else does them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from weft.core.errors import NumbersError, ServerLostError, WeftError, WorkerError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE
from weft.server.clicks.order import SampleOrder
from weft.server.client import Client
from weft.server.coordinator import UnitReport
from weft.server.dense import DenseBlocks, dense_spec
from weft.server.embedding import table_specs
from weft.server.local_rows import LocalRows
from weft.server.replicated import AllReduce, ReplicatedDense
from weft.server.server_rows import RowSource, ServerRows
from weft.server.session import Keys, Rows, RowSession
from weft.server.task import Build, Task, open_task
from weft.server.wire.control import ControlClient
from weft.server.wire.endpoint import Endpoint

_build_lock = threading.Lock()  # workers may be threads, and torch has one generator for all of them


class _Dense(Protocol):
    """Replicated dense parameters, where there are such."""

    def load(self) -> None: ...

    def step(self, gradients: Rows, *, weight: float) -> None: ...

    def save(self) -> None: ...


class Worker:
    """The unit's work; `run_worker` is the loop around it."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        order: SampleOrder,
        rows: RowSource,
        *,
        replicated: _Dense | None = None,
        seeds_units: bool = False,
    ) -> None:
        """`seeds_units`: dropout follows from the unit, whoever does it. Not among threads: they share a generator."""
        self._task, self._model, self._order, self._rows = task, model, order, rows
        self._blocks = DenseBlocks(model)
        self._replicated = replicated
        self._seeds_units = seeds_units
        self._has_dense = len(self._blocks.keys) > 0

    def do(self, unit: int, *, save: bool) -> UnitReport:
        start = time.perf_counter()
        if self._seeds_units:
            torch.manual_seed((self._order.seed << 32) + unit)
        indices = self._order.indices(unit)
        self._rows.open(unit)
        if len(indices):
            loss_sum, gradients, wait_s = self._gradients(indices)
        else:
            loss_sum, gradients, wait_s = 0.0, {}, 0.0
        pushing = time.perf_counter()
        if self._replicated is not None:
            self._replicated.step(self._blocks.gradients(), weight=float(len(indices)))
        staleness = self._rows.finish(gradients, weight=float(len(indices)))
        if save and self._replicated is not None:
            self._replicated.save()
        now = time.perf_counter()
        wait_s += now - pushing
        return UnitReport(
            unit=unit,
            loss_sum=loss_sum,
            weight=float(len(indices)),
            compute_s=now - start - wait_s,
            wait_s=wait_s,
            staleness=staleness,
        )

    def _gradients(self, indices: Keys) -> tuple[float, dict[str, tuple[Keys, Rows]], float]:
        batch = self._task.read(indices)
        session = RowSession(self._rows.read)
        pulling = time.perf_counter()
        self._pull(session, batch)
        wait_s = time.perf_counter() - pulling
        self._blocks.clear_gradients()
        with session:
            loss = self._task.loss_sum(self._model, batch)
        loss_sum = loss.item()
        if not math.isfinite(loss_sum):
            raise NumbersError(
                f"the loss is {loss_sum}", hint="lower the learning rates; geo_merge = 'sum' may diverge"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = session.take_gradients()
        if self._has_dense and self._replicated is None:
            gradients[DENSE_TABLE] = (self._blocks.keys, self._blocks.gradients())
        return loss_sum, gradients, wait_s

    def _pull(self, session: RowSession, batch: Any) -> None:
        """Dense and sparse rows, in one round trip where the task says what it will look up."""
        wanted = dict(self._task.wanted(batch))
        if self._replicated is not None:
            self._replicated.load()
        elif self._has_dense:
            session.prefetch({**wanted, DENSE_TABLE: self._blocks.keys})
            self._blocks.load(session.take_rows(DENSE_TABLE))
            return
        if wanted:
            session.prefetch(wanted)


def run_worker(
    coordinator: Endpoint,
    *,
    token: str,
    name: str,
    build: Build | None = None,
    is_thread: bool = False,
    is_guest: bool = False,
) -> None:
    """A worker from joining to the end of the data. An error is told to the coordinator, then raised.

    `is_guest`: came by itself; it only leaves when something is wrong with it, and the run goes on without it.
    """
    control = ControlClient(coordinator, token=token)
    told = control.ask("join", name=name)
    beats = _Beats(coordinator, token=token, name=name, every_s=told["run"]["server"]["lease_s"] / 4)
    try:
        with beats:
            _work(control, told, token=token, name=name, build=build, is_thread=is_thread)
        with contextlib.suppress(
            ServerLostError
        ):  # who was the last to hear of the end may find nobody to take leave of
            control.ask("leave", worker=name)
    except Exception as error:
        cause = error if isinstance(error, WeftError) else _as_worker_error(error)
        _tell(control, name, cause, is_guest=is_guest)
        raise cause from (None if cause is error else error)
    finally:
        control.close()


def _work(
    control: ControlClient, told: dict[str, Any], *, token: str, name: str, build: Build | None, is_thread: bool
) -> None:
    run = ServerRun.from_tables(told["run"])
    client = Client(
        lambda server: find_server(control, server),
        num_servers=run.server.servers,
        token=token,
        client_id=told["client_id"],
        timeout_s=run.server.server_timeout_s,
    )
    try:
        task = open_task(run, Path(told["out"]), build=build)
        model = build_seeded(task, seed=run.train.seed)
        rows, replicated = _assembled(run, told, model, client)
        order = order_of(run, task)
        worker = Worker(task, model, order, rows, replicated=replicated, seeds_units=not is_thread)
        _loop(control, worker, rows, name=name, joined=told["joined"])
    finally:
        client.close()


def _assembled(
    run: ServerRun, told: dict[str, Any], model: nn.Module, client: Client
) -> tuple[RowSource, ReplicatedDense | None]:
    """Where rows and dense parameters live, by the run's mode."""
    specs = [*table_specs(model), dense_spec(run.dense.optimizer)]
    for spec in specs:
        client.create(spec)
    workers, is_averaged = run.server.workers, run.server.geo_merge == "average"
    rows: RowSource = ServerRows(client, parts=1 if run.server.is_aggregated else workers)
    if run.server.mode == "geo":
        rows = LocalRows(
            client,
            specs,
            exchange_every=run.server.geo_steps,
            cache_rows=run.server.geo_cache_rows,
            shares=workers if is_averaged else 1,
        )
    replicated = None
    if run.dense.place == "replicated":
        store = told["store"]
        reduce = AllReduce(rank=told["rank"], size=run.server.workers, timeout_s=run.server.server_timeout_s, **store)
        replicated = ReplicatedDense(DenseBlocks(model), specs[-1], client, reduce)
    return rows, replicated


def _loop(control: ControlClient, worker: Worker, rows: RowSource, *, name: str, joined: int) -> None:
    held: list[UnitReport] = []
    finished: list[dict[str, Any]] = []
    asked = time.perf_counter()
    while True:
        answer = control.ask("next", worker=name, finished=finished, held=len(held), joined=joined)
        finished = []
        if answer.get("end"):
            return
        if "unit" in answer:
            waited_s = time.perf_counter() - asked
            report = worker.do(answer["unit"], save=answer["save"])
            held.append(UnitReport(**{**report.as_dict(), "wait_s": report.wait_s + waited_s}))
            asked = time.perf_counter()
        if held and (rows.is_due or answer.get("settle") or answer.get("alone")):
            if rows.settle():
                finished = [report.as_dict() for report in held]
            else:
                control.ask("leave", worker=name)  # it was thought lost, and others did its units
            held = []


def find_server(control: ControlClient, server: int) -> Endpoint:
    found = control.ask("find", server=server)
    if not found:
        raise LookupError(f"server {server} is down")
    return Endpoint(found["host"], found["port"])


def build_seeded(task: Task, *, seed: int) -> nn.Module:
    """The model, with first weights that follow from the seed."""
    with _build_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return task.build_model()


def order_of(run: ServerRun, task: Task) -> SampleOrder:
    return SampleOrder(
        num_train=task.num_train,
        global_batch=run.train.global_batch,
        shares=run.server.workers,
        seed=run.train.seed,
    )


class _Beats:
    """Tells the coordinator four times a lease that this worker lives, over a connection of its own."""

    def __init__(self, coordinator: Endpoint, *, token: str, name: str, every_s: float) -> None:
        self._control = ControlClient(coordinator, token=token)
        self._name, self._every_s = name, every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"{name}-beats", daemon=True)

    def _beat(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self._control.ask("beat", worker=self._name)
            except WeftError:
                return  # the worker's own next question finds out, too

    def __enter__(self) -> _Beats:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self._control.close()


def _as_worker_error(error: Exception) -> WorkerError:
    lines = str(error).strip().splitlines() or ["(no message)"]
    return WorkerError(f"{type(error).__name__}: {lines[0]}", hint="set WEFT_DEBUG=1 to see the stack trace")


def _tell(control: ControlClient, name: str, error: WeftError, *, is_guest: bool) -> None:
    try:
        control.ask("leave", worker=name) if is_guest else control.ask("fail", who=name, error=error.as_dict())
    except WeftError:
        return  # the coordinator is gone: nobody is left to tell
