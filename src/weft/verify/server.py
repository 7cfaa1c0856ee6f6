"""`weft verify` of a run on parameter servers: the servers' rows against those of one process.

    sync, 1/2/4 workers x 1/2/3 servers   every optimizer, sparse and dense rows, against the reference
    async, staleness 0                    equal bits to sync
    async, free                           one schedule twice: equal bits; against the reference of that schedule
    geo, K = 1, one worker                against the reference
    resume, other servers                 stopped half way, on another number of servers: bits of the uninterrupted run

The bound is measured: the reference itself, with its sums in other orders.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weft.core.server_spec import FREE, ServerRun
from weft.server.model.task import open_task
from weft.server.node.reshard import reshard
from weft.server.worker.worker import order_of
from weft.verify.server_reference import Reference
from weft.verify.server_runs import ServerRunResult, changed, follow, schedule, shrunk, train
from weft.verify.tolerances import SLACK, SUM_ROUNDINGS, UNIT_ROUNDOFF
from weft.verify.verdict import Check, Finding, Verdict, Worst

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl")
WORKERS, SERVERS = (1, 2, 4), (1, 2, 3)
_ORDERS = (2, 3, 5, 7)  # chunks of a batch in which the reference sums again
_NUM_EVENTS = 24  # units of the schedule that asynchronous workers follow


@dataclass
class ServerSession:
    """One verification; `checks` yields each check when it is done."""

    run: ServerRun
    steps: int
    scratch: Path
    optimizers: tuple[str, ...] = OPTIMIZERS
    layouts: tuple[tuple[int, int], ...] = tuple(itertools.product(WORKERS, SERVERS))
    loss_max_abs_diff: float = 0.0
    worst: Worst = field(default_factory=Worst)
    _folders: Iterator[int] = field(default_factory=itertools.count)

    def checks(self) -> Iterator[Check]:
        for kind in self.optimizers:
            yield self._sync(_with_optimizer(self.run, kind))
        yield self._no_staleness(self.run)
        yield self._free(self.run)
        yield self._geo(self.run)
        yield self._resumed(self.run)

    def _sync(self, run: ServerRun) -> Check:
        """Check all layouts of one optimizer against one reference."""
        name = f"sync, {run.sparse.optimizer.kind}"
        expected, allowed = self._reference(run)
        margin = 0.0
        for workers, servers in self.layouts:
            found = self._train(changed(run, "server", mode="sync", workers=workers, servers=servers))
            place = f"{workers} workers x {servers} servers"
            wrong, used = self._compare(found, expected, allowed, place=place)
            if wrong is not None:
                return Check.failed(name, wrong)
            margin = max(margin, used)
        detail = f"{len(self.layouts)} layouts of workers and servers, {self.steps} steps: rows and losses agree"
        return Check.passed(name, f"{detail}, at most {margin:.2f} of the allowed difference", margin=margin)

    def _no_staleness(self, run: ServerRun) -> Check:
        shape = {"workers": 2, "servers": 2}
        sync = self._train(changed(run, "server", mode="sync", **shape))
        bound = self._train(changed(run, "server", mode="async", staleness=0, **shape))
        return _same_bits("async, staleness 0", bound, sync, "equal bits to sync")

    def _free(self, run: ServerRun) -> Check:
        name = "async, free"
        run = changed(run, "server", mode="async", staleness=FREE, workers=3, servers=2)
        events = schedule(_NUM_EVENTS, workers=3, seed=run.train.seed)
        first, second = (follow(run, self._folder(), events) for _ in range(2))
        again = _same_bits(name, second, first, "equal bits in two runs of one schedule")
        if not again.ok:
            return again
        reference = Reference(run, open_task(run, self._folder()))
        order = order_of(run, reference.task)
        reference.follow(events, order, discount=run.server.discount)
        expected = ServerRunResult(losses=(), tables={n: table.everything() for n, table in reference.tables.items()})
        _, allowed = self._reference(run)
        wrong, margin = self._compare(first, expected, allowed, place="following the schedule")
        if wrong is not None:
            return Check.failed(name, wrong)
        detail = f"{len(events)} pulls and pushes of 3 workers in one order: equal bits twice, rows of the reference"
        return Check.passed(name, detail, margin=margin)

    def _geo(self, run: ServerRun) -> Check:
        name = "geo, K = 1"
        expected, allowed = self._reference(changed(run, "server", workers=1))
        found = self._train(changed(run, "server", mode="geo", geo_steps=1, workers=1, servers=2))
        wrong, margin = self._compare(found, expected, allowed, place="one worker x 2 servers")
        if wrong is not None:
            return Check.failed(name, wrong)
        return Check.passed(name, f"one worker equals local training over {self.steps} steps", margin=margin)

    def _resumed(self, run: ServerRun) -> Check:
        run = changed(run, "server", mode="sync", workers=2, servers=2)
        straight, folder = self._train(run), self._folder()
        train(changed(run, "train", steps=max(1, self.steps // 2)), folder)
        reshard(folder / "servers", 3)
        found = train(changed(run, "server", servers=3), folder, resume=True)
        detail = "stopped half way, resumed on 3 servers instead of 2: bits of the uninterrupted run"
        return _same_bits("resume", found, straight, detail)

    def _reference(self, run: ServerRun) -> tuple[ServerRunResult, dict[str, float]]:
        """The expected result, and the allowed difference of each table."""
        task = open_task(run, self._folder())
        runs = []
        for pieces in (1, *_ORDERS):
            reference = Reference(run, task)
            losses = reference.train(self.steps, pieces=pieces)
            tables = {name: table.everything() for name, table in reference.tables.items()}
            runs.append(ServerRunResult(losses=tuple(losses), tables=tables))
        first, *others = runs
        allowed = {"loss": max(abs(a - b) for other in others for a, b in zip(other.losses, first.losses, strict=True))}
        for name, (_, rows) in first.tables.items():
            spread = max(float(np.abs(other.tables[name][1] - rows).max(initial=0)) for other in others)
            allowed[name] = SLACK * spread + _floor(float(np.abs(rows).max(initial=0)))
        allowed["loss"] = SLACK * allowed["loss"] + _floor(max(first.losses))
        return first, allowed

    def _compare(
        self, found: ServerRunResult, expected: ServerRunResult, allowed: dict[str, float], *, place: str
    ) -> tuple[Finding | None, float]:
        """The first finding, and the largest difference relative to the allowed one."""
        margin = 0.0
        for step, (loss, right) in enumerate(zip(found.losses, expected.losses, strict=False), 1):
            self.loss_max_abs_diff = max(self.loss_max_abs_diff, abs(loss - right))
            margin = max(margin, abs(loss - right) / allowed["loss"])
            if abs(loss - right) > allowed["loss"]:
                return _wrong(f"a loss of {right:.7f}", f"{loss:.7f}", place=place, step=step), margin
        for name, (keys, rows) in expected.tables.items():
            finding, used = self._compare_table(name, found, keys, rows, allowed[name], place=place)
            if finding is not None:
                return finding, used
            margin = max(margin, used)
        return None, margin

    def _compare_table(
        self, name: str, found: ServerRunResult, keys: np.ndarray, rows: np.ndarray, allowed: float, *, place: str
    ) -> tuple[Finding | None, float]:
        own_keys, own_rows = found.tables.get(name, (np.empty(0, np.int64), np.empty((0, 0), np.float32)))
        if not np.array_equal(own_keys, keys):
            return _wrong(f"{len(keys)} rows", f"{len(own_keys)} rows, or other keys", place=place, table=name), np.inf
        distance = np.abs(own_rows - rows)
        scale = float(np.abs(rows).max(initial=0)) or 1.0
        if (relative := float(distance.max(initial=0)) / scale) > self.worst.rel_diff:
            self.worst = Worst(parameter=name, rel_diff=relative)
        margin = float(distance.max(initial=0)) / allowed
        if margin <= 1:
            return None, margin
        row, column = np.unravel_index(int(distance.argmax()), distance.shape)
        expected = f"key {keys[row]}, column {column}: {rows[row, column]:.7g}"
        return _wrong(expected, f"{own_rows[row, column]:.7g}", place=place, table=name), margin

    def _train(self, run: ServerRun) -> ServerRunResult:
        return train(run, self._folder())

    def _folder(self) -> Path:
        return self.scratch / str(next(self._folders))


def verify_server(run: ServerRun, *, steps: int = 5, as_is: bool = False) -> Verdict:
    """The verdict on every mode of a run on parameter servers."""
    start = time.monotonic()
    small, changes = shrunk(run, steps=steps, as_is=as_is)
    with tempfile.TemporaryDirectory(prefix="weft-verify-") as scratch:
        session = ServerSession(run=small, steps=steps, scratch=Path(scratch))
        checks = tuple(session.checks())
    return Verdict(
        plan=f"parameter servers, {small.model.factory or small.model.kind}",
        steps=steps,
        checks=checks,
        loss_max_abs_diff=session.loss_max_abs_diff,
        worst_weight=session.worst,
        changes=tuple(changes),
        elapsed_s=time.monotonic() - start,
    )


def _with_optimizer(run: ServerRun, kind: str) -> ServerRun:
    """Set the optimizer of sparse and dense rows, keeping the run's own settings where it has that kind."""
    for section in ("sparse", "dense"):
        own = getattr(run, section).optimizer
        if own.kind != kind:
            extra = {"initial_accumulator": 0.1} if kind == "ftrl" else {}
            run = changed(run, section, optimizer=own.model_copy(update={"kind": kind, "learning_rate": 0.05, **extra}))
    return run


def _same_bits(name: str, found: ServerRunResult, expected: ServerRunResult, what: str) -> Check:
    for table, (keys, rows) in expected.tables.items():
        own_keys, own_rows = found.tables.get(table, (np.empty(0, np.int64), np.empty((0, 0), np.float32)))
        if not np.array_equal(own_keys, keys) or not np.array_equal(own_rows, rows):
            return Check.failed(name, _wrong(what, "other rows", place="", table=table))
    if found.losses != expected.losses:
        return Check.failed(name, _wrong(what, "other losses", place=""))
    return Check.passed(name, what)


def _floor(scale: float) -> float:
    return SUM_ROUNDINGS * UNIT_ROUNDOFF["float32"] * max(scale, 1e-3)


def _wrong(expected: str, found: str, *, place: str, table: str | None = None, step: int | None = None) -> Finding:
    return Finding(rule=10, expected=expected, found=found, step=step, parameter=table, coordinates=place or None)
