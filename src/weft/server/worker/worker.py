"""A worker: requests a unit, reads its samples and rows, forward, backward, pushes gradients, requests the next.

It knows no other worker. The order within a unit:

    read samples -> pull (dense and sparse rows in one round trip) -> forward -> backward of the loss SUM -> push

The request for the next unit reports the last one. A geo worker reports its units after their exchange: if it dies
before, another worker repeats them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.core.errors import NumbersError, ServerLostError, WeftError, WorkerError, first_line
from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE
from weft.models.seeds import seed_generators
from weft.server.arrays import Keys, Rows
from weft.server.client import Client
from weft.server.model.dense import DenseBlocks, dense_spec
from weft.server.model.embedding import RowSession, table_specs
from weft.server.model.task import Build, Task, open_task
from weft.server.units import SampleOrder, UnitReport
from weft.server.wire.control import ControlClient
from weft.server.wire.sockets import Endpoint
from weft.server.worker.replicated import AllReduce, ReplicatedDense
from weft.server.worker.rows import LocalRows, RowSource, ServerRows

_build_lock = threading.Lock()  # workers may be threads, which share torch's generator


class Worker:
    """The work of one unit; `run_worker` is the loop around it."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        order: SampleOrder,
        rows: RowSource,
        *,
        replicated: ReplicatedDense | None = None,
        seeds_units: bool = False,
    ) -> None:
        """`seeds_units`: dropout follows from the unit. Not for threads, which share one generator."""
        self._task, self._model, self._order, self._rows = task, model, order, rows
        self._blocks = DenseBlocks(model)
        self._replicated = replicated
        self._seeds_units = seeds_units
        self._has_dense = len(self._blocks.keys) > 0

    def do(self, unit: int, *, save: bool) -> UnitReport:
        start = time.perf_counter()
        if self._seeds_units:
            seed_generators((self._order.seed << 32) + unit)
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
        """Dense and sparse rows, in one round trip if the task lists the keys of its lookups."""
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
    """A worker from joining to the end of the data. An error is reported to the coordinator, then raised.

    `is_guest`: it joined by itself; on an error it only leaves, and the run continues without it.
    """
    control = ControlClient(coordinator, token=token)
    assignment = control.ask("join", name=name)
    every_s = assignment["run"]["server"]["lease_s"] / 4
    try:
        with _heartbeat(coordinator, token=token, name=name, every_s=every_s):
            _work(control, assignment, token=token, name=name, build=build, is_thread=is_thread)
        with contextlib.suppress(ServerLostError):  # the coordinator may end before the last worker has left
            control.ask("leave", worker=name)
    except Exception as error:
        cause = error if isinstance(error, WeftError) else _as_worker_error(error)
        with contextlib.suppress(WeftError):  # the coordinator may be gone
            control.ask("leave", worker=name) if is_guest else control.ask("fail", who=name, error=cause.as_dict())
        raise cause from (None if cause is error else error)
    finally:
        control.close()


def _work(
    control: ControlClient, assignment: dict[str, Any], *, token: str, name: str, build: Build | None, is_thread: bool
) -> None:
    run = ServerRun.from_tables(assignment["run"])
    client = Client(
        lambda server: _find_server(control, server),
        num_servers=run.server.servers,
        token=token,
        client_id=assignment["client_id"],
        timeout_s=run.server.server_timeout_s,
    )
    try:
        task = open_task(run, Path(assignment["out"]), build=build)
        model = build_seeded(task, seed=run.train.seed)
        rows, replicated = _assembled(run, assignment, model, client)
        worker = Worker(task, model, order_of(run, task), rows, replicated=replicated, seeds_units=not is_thread)
        _loop(control, worker, rows, name=name, joined=assignment["joined"])
    finally:
        client.close()


def _assembled(
    run: ServerRun, assignment: dict[str, Any], model: nn.Module, client: Client
) -> tuple[RowSource, ReplicatedDense | None]:
    """Rows and dense parameters, by the mode of the run."""
    specs = [*table_specs(model), dense_spec(run.dense.optimizer)]
    for spec in specs:
        client.create(spec)
    server, workers = run.server, run.server.workers
    rows: RowSource = ServerRows(client, parts=1 if server.is_aggregated else workers)
    if server.mode == "geo":
        shares = workers if server.geo_merge == "average" else 1
        rows = LocalRows(
            client, specs, exchange_every=server.geo_steps, cache_rows=server.geo_cache_rows, shares=shares
        )
    if run.dense.place != "replicated":
        return rows, None
    reduce = AllReduce(rank=assignment["rank"], size=workers, timeout_s=server.server_timeout_s, **assignment["store"])
    return rows, ReplicatedDense(DenseBlocks(model), specs[-1], client, reduce)


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
            held.append(replace(report, wait_s=report.wait_s + waited_s))
            asked = time.perf_counter()
        if held and (rows.is_due or answer.get("settle") or answer.get("alone")):
            if rows.flush():
                finished = [report.as_dict() for report in held]
            else:
                control.ask("leave", worker=name)  # it was declared lost, and others did its units
            held = []


def _find_server(control: ControlClient, server: int) -> Endpoint:
    found = control.ask("find", server=server)
    if not found:
        raise LookupError(f"server {server} is down")
    return Endpoint(**found)


def build_seeded(task: Task, *, seed: int) -> nn.Module:
    """The model, with initial weights that follow from the seed."""
    with _build_lock, torch.random.fork_rng(devices=[]):
        seed_generators(seed)
        return task.build_model()


def order_of(run: ServerRun, task: Task) -> SampleOrder:
    train = run.train
    return SampleOrder(
        num_train=task.num_train, global_batch=train.global_batch, shares=run.server.workers, seed=train.seed
    )


def _as_worker_error(error: Exception) -> WorkerError:
    name = type(error).__name__
    return WorkerError(f"{name}: {first_line(error)}", hint="set WEFT_DEBUG=1 to see the stack trace")


@contextlib.contextmanager
def _heartbeat(coordinator: Endpoint, *, token: str, name: str, every_s: float) -> Iterator[None]:
    """Sends heartbeats from a thread, over a connection of its own."""
    control = ControlClient(coordinator, token=token)
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(WeftError):  # the next request of the worker fails, too
            while not is_over.wait(every_s):
                control.ask("beat", worker=name)

    thread = threading.Thread(target=beat, name=f"{name}-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        control.close()
