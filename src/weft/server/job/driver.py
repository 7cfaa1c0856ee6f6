"""The driver of a run on parameter servers, from a `ServerRun` to a run folder.

It computes no gradient. The order:

    folder, data -> coordinator -> launcher (servers, workers) -> tables, initial dense values -> leases
    loop: collect steps; at an evaluation or a snapshot the leases stop, the driver does it, the leases resume
    last evaluation and snapshot -> figures -> the end of workers, then of servers
"""

from __future__ import annotations

import secrets
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft.core.errors import BadValueError, ServerLostError, WeftError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import Eviction
from weft.report import write_report
from weft.server.clicks.task import prepare_data
from weft.server.client import Client
from weft.server.job.coordinator import Coordinator
from weft.server.job.records import (
    ServerDisplay,
    ServerFolder,
    ServerStepRecord,
    StepCollector,
    ledger_of,
    merged,
    server_row,
)
from weft.server.job.status import drop_live, keep_live
from weft.server.launchers import Launch, Launcher
from weft.server.model.dense import dense_spec
from weft.server.model.embedding import table_specs
from weft.server.model.task import Build, Evaluator, Task, open_task
from weft.server.node.reshard import reshard, server_folders
from weft.server.node.state import NodeSpec
from weft.server.units import Boundaries, Leases
from weft.server.wire.control import ControlServer
from weft.server.wire.sockets import Endpoint
from weft.server.worker.worker import build_seeded
from weft.train.folder.lock import FolderLock
from weft.train.folder.run_folder import read_json, write_json
from weft.train.folder.state import require_free
from weft.train.ranks.stop_flag import StopFlag

_LOOK_S = 0.05  # between two checks of the child processes
_START_S = 120.0  # for the start of servers: the replay of a long log takes time
NUM_HOT = 20  # keys per table


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
    require_usable = folder.require_run if resume else lambda: require_free(out)
    require_usable()
    if build is not None and run.server.launcher != "in_process":
        raise BadValueError(
            f"launcher {run.server.launcher!r} cannot be given a function of this process",
            hint="give 'module:function' as model.factory, or use the launcher 'in_process'",
        )
    with ExitStack() as stack:
        note = stack.enter_context(FolderLock(out)).acquire()
        require_usable()  # again, now that no other process writes
        if note and not quiet:
            print(f"note: {note}", file=sys.stderr)
        started_s = time.perf_counter()
        task = _prepare(run, folder, resume=resume, build=build)
        job = stack.enter_context(_Job(run, folder, build=build, address=address))
        stop = stack.enter_context(StopFlag())
        driver = stack.enter_context(_Driver(run, folder, job, task, quiet=quiet))
        ledger = driver.drive(stop, is_resumed=resume, started_s=started_s)
        if draws_report:  # not for the fifty runs of weft verify
            driver.write_report()
        return ledger


def _prepare(run: ServerRun, folder: ServerFolder, *, resume: bool, build: Build | None) -> Task:
    if resume and server_folders(folder.servers_path):
        reshard(folder.servers_path, run.server.servers)
    folder.create(run)
    try:
        prepare_data(run, folder.path)
        return open_task(run, folder.path.absolute(), build=build)
    except WeftError:
        if not resume:  # else the folder would block the corrected command
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


class _Job:
    """The coordinator on its socket and the child processes; leaving it ends them all."""

    def __init__(self, run: ServerRun, folder: ServerFolder, *, build: Build | None, address: str | None) -> None:
        host = "127.0.0.1"
        if run.server.launcher == "ray":
            from weft.server.launchers.ray import connect

            host = connect(address)
        # Kept here: the store ends with the run.
        is_replicated = run.dense.place == "replicated"
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if is_replicated else None
        self.token = secrets.token_hex(32)
        self.coordinator = Coordinator(assignment=self._assignment(run, folder, host))
        self._control = ControlServer(self.coordinator.answer, token=self.token, host=host)
        self._run, self._folder, self._build, self._address = run, folder, build, address
        self.launcher: Launcher | None = None

    def __enter__(self) -> _Job:
        endpoint = self._control.start()
        keep_live(self._folder.path, endpoint, token=self.token)
        self.launcher = _open_launcher(
            Launch(
                run=self._run,
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
        server = run.server
        node = NodeSpec(
            num_servers=server.servers,
            shares=server.workers,
            gate=server.gate,
            discount=server.discount,
            merge=server.geo_merge,
            durability=server.durability,
        )
        store = {} if self._store is None else {"host": host, "port": self._store.port}
        tables = run.model_dump(mode="json", exclude_none=True)
        return {"run": tables, "out": str(folder.path.absolute()), "node": node.as_dict(), "store": store}


def _open_launcher(launch: Launch) -> Launcher:
    if launch.run.server.launcher == "ray":
        from weft.server.launchers.ray import RayLauncher

        return RayLauncher(launch)
    if launch.run.server.launcher == "processes":
        from weft.server.launchers.processes import ProcessLauncher

        return ProcessLauncher(launch)
    from weft.server.launchers.in_process import InProcessLauncher

    return InProcessLauncher(launch)


class _Driver:
    def __init__(self, run: ServerRun, folder: ServerFolder, job: _Job, task: Task, *, quiet: bool) -> None:
        self._run, self._folder, self._job, self._task = run, folder, job, task
        self._coordinator, self._shares = job.coordinator, run.server.workers
        self._display = ServerDisplay(total_steps=run.train.steps, every=run.logging.every, is_speaking=not quiet)
        self._client = Client(
            self._find,
            num_servers=run.server.servers,
            token=job.token,
            client_id=self._coordinator.client_id,
            timeout_s=run.server.server_timeout_s,
        )
        self._boundaries = Boundaries(run)
        self._records: list[ServerStepRecord] = []
        self._pending: ServerStepRecord | None = None  # waits for its evaluation
        self._evaluations: list[dict[str, Any]] = []
        self._timeline: list[dict[str, Any]] = []
        self._train_s = 0.0

    def __enter__(self) -> _Driver:
        return self

    def __exit__(self, *error: object) -> None:
        self._display.stop()
        self._client.close()
        self._folder.close()

    def _find(self, server: int) -> Endpoint:
        # While the driver waits for a server, in an evaluation for example, nothing else restarts child processes.
        self._job.look()
        return self._coordinator.server_endpoint(server)

    def drive(self, stop: StopFlag, *, is_resumed: bool, started_s: float) -> dict[str, Any]:
        self._await_servers()
        model = build_seeded(self._task, seed=self._run.train.seed)
        self._tables = table_specs(model)
        for spec in [*self._tables, dense_spec(self._run.dense.optimizer)]:
            self._client.create(spec)
        self._evaluator = Evaluator(self._task, model, self._client)
        first = self._first_unit(is_resumed=is_resumed)
        if not first:  # a resumed run has them, and a change would end the wait for repeated shares
            self._evaluator.assign_first()
        status = self._train(first, stop)
        self._display.stop()
        figures = self._write_figures()
        times = {"train_s": self._train_s, "elapsed_s": time.perf_counter() - started_s}
        ledger = ledger_of(self._run, self._records, figures, status=status, times=times, folder=self._folder.path)
        write_json(self._folder.ledger_path, ledger)
        self._display.summary(ledger)
        return ledger

    def _await_servers(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._coordinator.wait_for_servers(self._run.server.servers, timeout_s=_LOOK_S):
            self._job.look()
            if time.monotonic() > deadline:
                raise ServerLostError(f"servers did not start within {_START_S:.0f} s", hint="see logs/ in the folder")

    def _first_unit(self, *, is_resumed: bool) -> int:
        """The unit to resume from: every server has every unit below."""
        first = min(int(stats["units"]) for stats in self._client.stats()) if is_resumed else 0
        step = first // self._shares
        self._records = self._folder.metrics.drop_after(step)
        if is_resumed:
            self._display.line(f"going on after step {step} of {self._run.train.steps}")
            entries = read_json(self._folder.figures_path).get("evaluations", [])
            self._evaluations = [entry for entry in entries if entry["step"] <= step]
        return first

    def _train(self, first: int, stop: StopFlag) -> str:
        run, shares = self._run, self._shares
        leases = Leases(
            shares=shares,
            first=first,
            end=max(first, run.train.steps * shares),
            gate=run.server.gate,
            lease_s=run.server.lease_s,
            clock=time.monotonic,
            is_static=run.dense.place == "replicated",
        )
        hold = leases.hold = self._boundaries.after(first // shares) * shares
        rate = run.sparse.optimizer.learning_rate
        collector = StepCollector(shares=shares, first_unit=first, learning_rate=rate, now=time.monotonic())
        self._coordinator.begin(leases)
        self._display.start(done=first // shares)
        end, is_stopping = leases.end, False
        while True:
            if stop.requested and not is_stopping:
                is_stopping, end = True, self._coordinator.stop_early()
                hold = min(hold, end)
            collector.start_time(leases.began_s)
            done = self._collect(collector, hold)
            self._job.look()
            if done < hold:
                continue
            self._at_boundary(hold // shares, is_end=hold >= end, is_trained=hold > first)
            if hold >= end:
                return "stopped" if is_stopping and end < run.train.steps * shares else "finished"
            hold = min(end, self._boundaries.after(hold // shares) * shares)
            collector.skip_time(time.monotonic())
            self._coordinator.release(hold)

    def _collect(self, collector: StepCollector, hold: int) -> int:
        """Writes the steps that became complete; returns the watermark."""
        reports, done = self._coordinator.take_reports(timeout_s=_LOOK_S)
        for report in reports:
            collector.add(report)
        for record in collector.complete(done=min(done, hold), now=time.monotonic()):
            self._train_s += record.step_s
            if record.step * self._shares == hold:
                self._pending = record  # its evaluation follows
            else:
                self._write(record)
        return done

    def _at_boundary(self, step: int, *, is_end: bool, is_trained: bool) -> None:
        record, self._pending = self._pending, None
        if is_trained and self._boundaries.is_shrink(step):
            self._shrink()  # first: the evaluated rows are the saved ones
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
        self._write_figures()

    def _shrink(self) -> None:
        """Evicts rows while no worker trains, so that the choice does not depend on the speed of workers."""
        for spec in self._tables:
            if spec.eviction != Eviction() and (dropped := self._client.shrink(spec.name)):
                self._display.line(f"{dropped:,} rows of {spec.name} were dropped")

    def _write(self, record: ServerStepRecord) -> None:
        self._records.append(record)
        self._folder.append_metrics(record, tensorboard=self._run.logging.tensorboard)
        self._display.step(record)

    def _write_figures(self) -> dict[str, Any]:
        servers = [server_row(stats) for stats in self._client.stats()]
        hot = {spec.name: [list(pair) for pair in self._client.hot(spec.name, NUM_HOT)] for spec in self._tables}
        figures = {
            "servers": servers,
            "workers": self._coordinator.worker_rows(),
            "staleness": merged([server["staleness"] for server in servers]),
            "hot_keys": hot,
            "evaluations": self._evaluations,
            "timeline": self._timeline,
            "events": self._coordinator.events,
        }
        write_json(self._folder.figures_path, figures)
        return figures

    def write_report(self) -> None:
        self._display.line(f"run folder {self._folder.path}; open {write_report(self._folder.path)}")
