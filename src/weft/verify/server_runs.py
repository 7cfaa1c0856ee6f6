"""Small runs on parameter servers in this process, and the contents of their folders afterwards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.core.server_spec import ServerRun
from weft.core.table_spec import DENSE_TABLE
from weft.server.client import Client
from weft.server.job.driver import run_job
from weft.server.job.records import ServerFolder
from weft.server.model.dense import DenseBlocks, dense_spec
from weft.server.model.embedding import table_specs
from weft.server.model.task import Task, open_task
from weft.server.node.reshard import server_folders
from weft.server.node.server import Server
from weft.server.node.snapshots import restore
from weft.server.node.state import NodeSpec
from weft.server.worker.rows import ServerRows
from weft.server.worker.worker import Worker, build_seeded, order_of
from weft.verify.server_reference import ServerEvent

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]

_TOKEN = "verify"
# Large enough for keys shared between workers on every server, and for several blocks of dense parameters.
_SMALL: dict[str, Any] = {
    "data": {"samples": 600, "vocabulary": 40, "categorical": 4, "numeric": 3},
    "train": {"global_batch": 24},
    "model": {"embedding_dim": 4, "hidden": (40, 24)},
}


@dataclass(frozen=True, kw_only=True)
class ServerRunResult:
    """Results of a run: its losses by step, and every row of every table in key order."""

    losses: tuple[float, ...]
    tables: dict[str, tuple[Keys, Rows]]


def shrunk(run: ServerRun, *, steps: int, as_is: bool) -> tuple[ServerRun, list[str]]:
    """The shrunk run, and the list of changes."""
    changes: list[str] = []
    tables = run.model_dump()
    for section, values in _SMALL.items() if not as_is else ():
        for key, small in values.items():
            if key != "hidden" and not tables[section][key] > small:
                continue
            if section == "data" and run.data.source != "clicks":
                continue
            changes.append(f"{section}.{key} {tables[section][key]} -> {small}")
            tables[section][key] = small
    tables["train"]["steps"] = steps
    tables["evaluation"]["every"] = 0
    tables["logging"]["tensorboard"] = False
    tables["server"]["launcher"] = "in_process"
    tables["dense"]["place"] = "servers"
    return ServerRun.from_tables(tables), changes


def changed(run: ServerRun, section: str, **fields: Any) -> ServerRun:
    return run.model_copy(update={section: getattr(run, section).model_copy(update=fields)})


def train(run: ServerRun, out: Path, *, resume: bool = False) -> ServerRunResult:
    run_job(run, out, resume=resume, quiet=True, draws_report=False)
    return found_in(out)


def found_in(out: Path) -> ServerRunResult:
    """Read the result from the folder alone, so that the servers' durable state is checked."""
    folder = ServerFolder(out)
    parts: dict[str, list[tuple[Keys, Rows]]] = {}
    for path in server_folders(folder.servers_path):
        state, _ = restore(path, NodeSpec())
        for table in state.tables:
            records = table.records(0, table.num_slots)
            parts.setdefault(table.spec.name, []).append((np.array(records["key"]), np.array(records["values"])))
    losses = tuple(record.loss for record in folder.metrics.read())
    return ServerRunResult(losses=losses, tables={name: _in_order(pairs) for name, pairs in parts.items()})


def _in_order(pairs: Sequence[tuple[Keys, Rows]]) -> tuple[Keys, Rows]:
    keys, rows = np.concatenate([keys for keys, _ in pairs]), np.concatenate([rows for _, rows in pairs])
    order = np.argsort(keys)
    return keys[order], rows[order]


def schedule(num_units: int, *, workers: int, seed: int) -> list[ServerEvent]:
    """A random order of pulls and pushes of asynchronous workers, each with one unit in flight at a time."""
    generator, events = np.random.default_rng(seed), []
    under_way: dict[int, int] = {}
    units = itertools.count()
    left = num_units
    while left or under_way:
        worker = int(generator.integers(workers))
        if worker in under_way:
            events.append(ServerEvent(worker, under_way.pop(worker), is_push=True))
        elif left:
            under_way[worker] = next(units)
            events.append(ServerEvent(worker, under_way[worker], is_push=False))
            left -= 1
    return events


def follow(run: ServerRun, out: Path, events: Sequence[ServerEvent]) -> ServerRunResult:
    """Run the real servers, clients and workers, one event after another."""
    task = open_task(run, out)
    with _served(run, out) as endpoints:
        workers = [_Scheduled(run, task, endpoints, number) for number in range(run.server.workers)]
        for event in events:
            workers[event.worker].push() if event.is_push else workers[event.worker].pull(event.unit)
        for worker in workers:
            worker.client.close()
    return found_in(out)


@contextlib.contextmanager
def _served(run: ServerRun, out: Path) -> Iterator[list[Any]]:
    spec = NodeSpec(
        num_servers=run.server.servers, shares=run.server.workers, gate=run.server.gate, discount=run.server.discount
    )
    ServerFolder(out).create(run)
    with contextlib.ExitStack() as stack:
        endpoints = []
        for index in range(run.server.servers):
            server = Server(index=index, spec=spec, folder=out / "servers" / str(index), token=_TOKEN)
            stack.callback(server.stop)
            endpoints.append(server.start())
        yield endpoints


class _Scheduled:
    """A worker whose push waits for a call of `push`."""

    def __init__(self, run: ServerRun, task: Task, endpoints: list[Any], number: int) -> None:
        self.client = Client(endpoints.__getitem__, num_servers=len(endpoints), token=_TOKEN, client_id=number + 1)
        model = build_seeded(task, seed=run.train.seed)
        for spec in [*table_specs(model), dense_spec(run.dense.optimizer)]:
            self.client.create(spec)
        blocks = DenseBlocks(model)
        self.client.assign(DENSE_TABLE, blocks.keys, blocks.rows())
        self._rows = _HeldRows(self.client, parts=run.server.workers)
        self._worker = Worker(task, model, order_of(run, task), self._rows)

    def pull(self, unit: int) -> None:
        self._worker.do(unit, save=False)

    def push(self) -> None:
        self._rows.send()


class _HeldRows(ServerRows):
    """`finish` keeps the gradients; `send` sends them."""

    def finish(self, gradients: Any, *, weight: float) -> tuple[int, ...]:
        self._kept = ({name: (np.array(k), np.array(v)) for name, (k, v) in gradients.items()}, weight)
        return ()

    def send(self) -> None:
        gradients, weight = self._kept
        super().finish(gradients, weight=weight)
