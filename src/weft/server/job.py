"""A whole run on parameter servers, from a `ServerRun` to a run folder: the driver.

It computes no gradient. The order:

    folder, data -> coordinator -> launcher (servers, workers) -> tables, first dense values -> leases
    loop: collect steps; at an evaluation or a snapshot the leases stop there, it is done, they go on
    last evaluation and snapshot -> figures -> the end of workers, then of servers
"""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft.core.errors import BadValueError, ServerLostError, WeftError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import Eviction
from weft.report import write_report
from weft.server.boundaries import Boundaries
from weft.server.clicks.task import prepare_data
from weft.server.client import Client
from weft.server.coordinator import Coordinator
from weft.server.dense import dense_spec
from weft.server.display import ServerDisplay
from weft.server.embedding import table_specs
from weft.server.evaluation import Evaluator
from weft.server.figures import ledger_of, server_figures
from weft.server.folder import ServerFolder
from weft.server.launchers import Launch, Launcher, open_launcher
from weft.server.leases import Leases
from weft.server.node.reshard import reshard, server_folders
from weft.server.node.spec import NodeSpec
from weft.server.status import drop_live, keep_live
from weft.server.step_record import ServerStepRecord, StepBook
from weft.server.task import Build, Task, open_task
from weft.server.wire.control import ControlServer
from weft.server.wire.endpoint import Endpoint
from weft.server.worker import build_seeded
from weft.train.folder_lock import FolderLock
from weft.train.folder_state import require_free
from weft.train.stop_flag import StopFlag

_LOOK_S = 0.05  # between two looks at the children
_START_S = 120.0  # for servers to come up: replaying a long log takes time


def run_job(
    run: ServerRun,
    out: Path,
    *,
    resume: bool = False,
    address: str | None = None,
    build: Build | None = None,
    quiet: bool = False,
    draws_report: bool = True,
) -> dict[str, Any]:
    """Train; returns the ledger. `address`: of a Ray cluster. `build`: see `Trainer`."""
    folder = ServerFolder(out)
    _require_usable(folder, resume=resume)
    if build is not None and run.server.launcher != "in_process":
        raise BadValueError(
            f"launcher {run.server.launcher!r} cannot be given a function of this process",
            hint="give 'module:function' as model.factory, or use the launcher 'in_process'",
        )
    with FolderLock(out) as lock:
        note = lock.acquire()
        _require_usable(folder, resume=resume)  # how it stands now that nobody else writes
        if note and not quiet:
            print(f"note: {note}", file=sys.stderr)
        return _run_locked(
            run, folder, resume=resume, address=address, build=build, quiet=quiet, draws_report=draws_report
        )


def _require_usable(folder: ServerFolder, *, resume: bool) -> None:
    if resume:
        folder.require_run()
    else:
        require_free(folder.path)


def _run_locked(
    run: ServerRun,
    folder: ServerFolder,
    *,
    resume: bool,
    address: str | None,
    build: Build | None,
    quiet: bool,
    draws_report: bool,
) -> dict[str, Any]:
    started_s = time.perf_counter()
    if resume and server_folders(folder.servers_path):
        reshard(folder.servers_path, run.server.servers)
    folder.create(run)
    try:
        prepare_data(run, folder.path)
        task = open_task(run, folder.path.absolute(), build=build)
    except WeftError:
        if not resume:  # else the mended command would find its folder in the way
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    with _Stage(run, folder, build=build, address=address) as stage, StopFlag() as stop:
        driver = _Driver(run, folder, stage, task, quiet=quiet)
        try:
            ledger = driver.drive(stop, is_resumed=resume, started_s=started_s)
            if draws_report:  # weft verify has fifty runs that nobody will look at
                driver.tell_report()
            return ledger
        finally:
            driver.close()


class _Stage:
    """The coordinator on its socket and the children around it; leaving it ends them all."""

    def __init__(self, run: ServerRun, folder: ServerFolder, *, build: Build | None, address: str | None) -> None:
        is_static = run.dense.place == "replicated"
        host = "127.0.0.1"
        if run.server.launcher == "ray":
            from weft.server.launchers.ray import connect

            host = connect(address)
        # Held here: it ends with the run.
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_static else None
        self.token = secrets.token_hex(32)
        self.coordinator = Coordinator(assignment=self._assignment(run, folder, host), is_static=is_static)
        self._control = ControlServer(self.coordinator.answer, token=self.token, host=host)
        self._run, self._folder, self._build, self._address = run, folder, build, address
        self.launcher: Launcher | None = None

    def __enter__(self) -> _Stage:
        endpoint = self._control.start()
        keep_live(self._folder.path, endpoint, token=self.token)
        self.launcher = open_launcher(
            Launch(
                spec=self._run.server,
                needs_all_workers=self._run.dense.place == "replicated",
                coordinator=self.coordinator,
                endpoint=endpoint,
                token=self.token,
                logs=self._folder.logs_path,
                build=self._build,
                address=self._address,
            )
        )
        try:
            self.launcher.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.coordinator.end()
        if self.launcher is not None:
            self.launcher.stop()
        self._control.stop()
        drop_live(self._folder.path)

    def look(self) -> None:
        if self.launcher is not None:
            self.launcher.look()
        if self.coordinator.failure is not None:
            raise self.coordinator.failure

    def _assignment(self, run: ServerRun, folder: ServerFolder, host: str) -> dict[str, Any]:
        node = NodeSpec(
            num_servers=run.server.servers,
            shares=run.server.workers,
            gate=run.server.gate,
            discount=run.server.discount,
            merge=run.server.geo_merge,
            durability=run.server.durability,
        )
        store = {} if self._store is None else {"host": host, "port": self._store.port}
        tables = run.model_dump(mode="json", exclude_none=True)
        return {"run": tables, "out": str(folder.path.absolute()), "node": node.as_dict(), "store": store}


class _Driver:
    def __init__(self, run: ServerRun, folder: ServerFolder, stage: _Stage, task: Task, *, quiet: bool) -> None:
        self._run, self._folder, self._stage, self._task = run, folder, stage, task
        self._coordinator = stage.coordinator
        self._display = ServerDisplay(total_steps=run.train.steps, every=run.logging.every, is_speaking=not quiet)
        self._client = Client(
            self._find,
            num_servers=run.server.servers,
            token=stage.token,
            client_id=self._coordinator.client_id,
            timeout_s=run.server.server_timeout_s,
        )
        self._boundaries = Boundaries(run)
        self._records: list[ServerStepRecord] = []
        self._pending: ServerStepRecord | None = None  # a line that waits for its evaluation
        self._evaluations: list[dict[str, Any]] = []
        self._timeline: list[dict[str, Any]] = []
        self._train_s = 0.0

    def _find(self, server: int) -> Endpoint:
        # Nobody else looks at the children while the driver waits for a server, an evaluation's say: without this it
        # would wait for one that nobody starts again.
        self._stage.look()
        return self._coordinator.server_endpoint(server)

    def close(self) -> None:
        self._display.stop()
        self._client.close()
        self._folder.close()

    def drive(self, stop: StopFlag, *, is_resumed: bool, started_s: float) -> dict[str, Any]:
        self._await_servers()
        model = build_seeded(self._task, seed=self._run.train.seed)
        self._tables = [spec.name for spec in table_specs(model)]
        self._evicted = [spec.name for spec in table_specs(model) if spec.eviction != Eviction()]
        for spec in [*table_specs(model), dense_spec(self._run.dense.optimizer)]:
            self._client.create(spec)
        self._evaluator = Evaluator(self._task, model, self._client)
        first = self._first_unit(is_resumed=is_resumed)
        if not first:  # a run that goes on has them, and a change would end the wait for shares that are done again
            self._evaluator.assign_first()
        status = self._train(first, stop)
        self._display.stop()
        return self._finish(status, elapsed_s=time.perf_counter() - started_s)

    def _await_servers(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._coordinator.wait_for_servers(self._run.server.servers, timeout_s=_LOOK_S):
            self._stage.look()
            if time.monotonic() > deadline:
                raise ServerLostError(f"servers did not start within {_START_S:.0f} s", hint="see logs/ in the folder")

    def _first_unit(self, *, is_resumed: bool) -> int:
        """Where the data goes on: below this every server has every unit."""
        shares = self._run.server.workers
        first = min(int(stats["units"]) for stats in self._client.stats()) if is_resumed else 0
        self._records = self._folder.metrics.drop_after(first // shares)
        if is_resumed:
            self._display.line(f"going on after step {first // shares} of {self._run.train.steps}")
            self._evaluations = [
                entry
                for entry in self._folder.read_json("server.json").get("evaluations", [])
                if entry["step"] <= first // shares
            ]
        return first

    def _train(self, first: int, stop: StopFlag) -> str:
        run, shares = self._run, self._run.server.workers
        leases = Leases(
            shares=shares,
            first=first,
            end=max(first, run.train.steps * shares),
            gate=run.server.gate,
            lease_s=run.server.lease_s,
            clock=time.monotonic,
            is_static=run.dense.place == "replicated",
        )
        hold = self._boundaries.after(first // shares) * shares
        leases.hold = hold
        rate = run.sparse.optimizer.learning_rate
        book = StepBook(shares=shares, first_unit=first, learning_rate=rate, now=time.monotonic())
        self._coordinator.begin(leases)
        self._display.start(done=first // shares)
        end, is_stopping = leases.end, False
        while True:
            if stop.requested and not is_stopping:
                is_stopping, end = True, self._coordinator.stop_early()
                hold = min(hold, end)
            book.start_time(leases.began_s)
            done = self._collect(book, hold)
            self._stage.look()
            if done < hold:
                continue
            self._at_boundary(hold // shares, is_end=hold >= end, is_trained=hold > first)
            if hold >= end:
                return "stopped" if is_stopping and end < run.train.steps * shares else "finished"
            hold = min(end, self._boundaries.after(hold // shares) * shares)
            book.skip_time(time.monotonic())
            self._coordinator.release(hold)

    def _collect(self, book: StepBook, hold: int) -> int:
        """Writes the steps that became complete; returns the watermark."""
        reports, done = self._coordinator.take_reports(timeout_s=_LOOK_S)
        for report in reports:
            book.add(report)
        for record in book.complete(done=min(done, hold), now=time.monotonic()):
            self._train_s += record.step_s
            if record.step * self._run.server.workers == hold:
                self._pending = record  # its evaluation follows
            else:
                self._write(record)
        return done

    def _at_boundary(self, step: int, *, is_end: bool, is_trained: bool) -> None:
        record, self._pending = self._pending, None
        if is_trained and self._boundaries.is_shrink(step):
            self._shrink()  # first: what is evaluated is what is saved
        if is_end or self._boundaries.is_evaluation(step):
            figures = self._evaluator.evaluate()
            self._evaluations.append({"step": step, **figures})
            self._display.evaluation(step, figures)
            if record is not None:
                record = replace(record, eval_loss=figures.get("loss"), auc=figures.get("auc"))
        if record is not None:
            self._write(record)
        if is_end or self._boundaries.is_snapshot(step):
            self._client.snapshot(incremental=not is_end and not self._boundaries.is_full(step))
        self._timeline.append({"step": step, "train_s": self._train_s, "servers": self._client.stats()})
        self._folder.write_json("server.json", self._figures())

    def _shrink(self) -> None:
        """Where tables have a rule of eviction, while nobody trains: what goes does not depend on who is faster."""
        for name in self._evicted:
            dropped = self._client.shrink(name)
            if dropped:
                self._display.line(f"{dropped:,} rows of {name} were dropped")

    def _write(self, record: ServerStepRecord) -> None:
        self._records.append(record)
        self._folder.append_metrics(record, tensorboard=self._run.logging.tensorboard)
        self._display.step(record)

    def _figures(self) -> dict[str, Any]:
        return server_figures(
            client=self._client,
            coordinator=self._coordinator,
            tables=self._tables,
            evaluations=self._evaluations,
            timeline=self._timeline,
        )

    def _finish(self, status: str, *, elapsed_s: float) -> dict[str, Any]:
        figures = self._figures()
        self._folder.write_json("server.json", figures)
        ledger = ledger_of(
            self._run,
            self._records,
            figures,
            status=status,
            elapsed_s=elapsed_s,
            train_s=self._train_s,
            folder=self._folder.path,
        )
        self._folder.write_json("ledger.json", ledger)
        self._display.summary(ledger)
        return ledger

    def tell_report(self) -> None:
        self._display.line(f"run folder {self._folder.path}; open {write_report(self._folder.path)}")
