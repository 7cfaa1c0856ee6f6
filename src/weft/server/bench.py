"""`weft server bench`: rows per second over loopback, beside the bound of the wire and the table.

    bound = 1 / (1 / raw TCP of the same bytes + 1 / the kernel of the table)        share = measured / bound

Raw TCP, the kernel, and servers with and without a log alternate, round by round; figures are medians of rounds.
Servers and workers are separate processes; rows of 64 columns, row-wise Adagrad, uniform keys.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table as Grid

from weft.core.table_spec import RowInit, RowOptimizer, TableSpec
from weft.server.arrays import Keys, Rows
from weft.server.client import Client
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec
from weft.server.table.table import Table
from weft.server.wire.frame import Frame, FrameReader, Op, TableSection, send_frame
from weft.server.wire.sockets import Endpoint, connect, tune

Kind = Literal["pull", "push"]
SIZES = (4096, 65536)  # keys of a call
DIM = 64
_TOKEN = "bench"
_END_S = 30.0
_RETIRE_S = 0.05
_BATCHES = 16
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """Rows per second; `log_cost` is the time of a push with the log over one without."""

    kind: Kind
    keys: int
    rows_per_s: float
    raw_rows_per_s: float
    kernel_rows_per_s: float
    share_of_bound: float
    two_workers: float  # rows per second of two over those of one
    log_cost: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench_spec() -> TableSpec:
    optimizer = RowOptimizer(kind="rowwise_adagrad", learning_rate=0.01)
    return TableSpec(name="bench", dim=DIM, optimizer=optimizer, init=RowInit(scale=0.01))


def run_bench(
    *, rows: int = 4_000_000, rounds: int = 7, sizes: tuple[int, ...] = SIZES, log: Callable[[str], None] = print
) -> list[BenchRecord]:
    """All figures; `log` gets progress lines."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-bench-")))
        log(f"filling tables of {rows:,} rows")
        served = {
            name: stack.enter_context(serving(serve, rows, folder))
            for name, folder in (("plain", None), ("log", scratch))
        }
        raw = stack.enter_context(serving(_serve_raw))
        workers = {
            "raw": [stack.enter_context(working(_raw_calls, raw))],
            "plain": [stack.enter_context(working(calls_of, served["plain"], rows, seed)) for seed in (1, 2)],
            "log": [stack.enter_context(working(calls_of, served["log"], rows, 3))],
            "kernel": [stack.enter_context(working(_kernel_calls, rows))],
        }
        kinds: tuple[Kind, ...] = ("pull", "push")
        return [_measure(workers, kind, size, rounds, log) for size in sizes for kind in kinds]


def _measure(
    workers: dict[str, list[Connection]], kind: Kind, size: int, rounds: int, log: Callable[[str], None]
) -> BenchRecord:
    teams = {name: workers[name] for name in ("raw", "kernel")}
    teams |= {"plain": workers["plain"][:1], "both": workers["plain"], "log": workers["log"]}
    calls = max(4, 400_000 // size)
    seconds = [
        {name: together(team, kind, size, calls) / calls for name, team in teams.items()} for _ in range(rounds + 1)
    ]
    median = {name: statistics.median(found[name] for found in seconds[1:]) for name in teams}  # the first warms up
    log(f"{kind} of {size:,} keys: {size / median['plain'] / 1e6:.2f} M rows/s")
    return BenchRecord(
        kind=kind,
        keys=size,
        rows_per_s=size / median["plain"],
        raw_rows_per_s=size / median["raw"],
        kernel_rows_per_s=size / median["kernel"],
        share_of_bound=(median["raw"] + median["kernel"]) / median["plain"],
        two_workers=2 * median["plain"] / median["both"],
        log_cost=median["log"] / median["plain"] if kind == "push" else None,
    )


def bench_table(records: list[BenchRecord]) -> Grid:
    grid = Grid(title="M rows/s of 64 columns over loopback, one server", title_justify="left")
    for heading in ("call", "keys", "measured", "raw TCP", "kernel", "of the bound", "2 workers", "log"):
        grid.add_column(heading, justify="right")
    for record in records:
        speeds = (record.rows_per_s, record.raw_rows_per_s, record.kernel_rows_per_s)
        figures = [f"{speed / 1e6:.2f}" for speed in speeds]
        figures += [f"{record.share_of_bound:.2f}", f"{record.two_workers:.2f} x"]
        log = f"{record.log_cost:.2f} x" if record.log_cost is not None else ""
        grid.add_row(record.kind, f"{record.keys:,}", *figures, log)
    return grid


# --- processes -------------------------------------------------------------------------------------------------------


@contextmanager
def _child(target: Callable[..., None], given: Sequence[Any]) -> Iterator[tuple[Connection, BaseProcess]]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *given), daemon=True)
    process.start()
    try:
        yield ours, process
    finally:
        process.terminate()
        process.join()


@contextmanager
def serving(target: Callable[..., None], *given: Any) -> Iterator[Endpoint]:
    """A server process; its endpoint."""
    with _child(target, given) as (pipe, _):
        yield Endpoint(*pipe.recv())


@contextmanager
def working(target: Callable[..., None], *given: Any) -> Iterator[Connection]:
    """A worker process; the pipe for `together`."""
    with _child(target, given) as (pipe, process):
        pipe.recv()
        yield pipe
        pipe.send(None)  # it may have child processes to end
        process.join(_END_S)


def together(workers: list[Connection], kind: Kind, size: int, calls: int) -> float:
    """Seconds until the last worker has made its calls."""
    for worker in workers:
        worker.send((kind, size, calls))
    return max(float(worker.recv()) for worker in workers)


def answer_calls(pipe: Connection, call: Callable[[Kind, Keys, Rows], None], rows: int, seed: int) -> None:
    """The worker's side: answers each (kind, size, calls) with seconds."""
    generator = np.random.default_rng(seed)
    pipe.send("ready")
    batches: dict[int, list[Keys]] = {}
    while (asked := pipe.recv()) is not None:
        kind, size, calls = asked
        if size not in batches:
            batches[size] = [unique_keys(generator, rows, size) for _ in range(_BATCHES)]
        values = np.full((size, DIM), 1e-4, np.float32)
        start = time.perf_counter()
        for number in range(calls):
            call(kind, batches[size][number % _BATCHES], values)
        pipe.send(time.perf_counter() - start)


def unique_keys(generator: np.random.Generator, rows: int, size: int) -> Keys:
    found = np.unique(generator.integers(0, rows, size + size // 4))
    generator.shuffle(found)
    return np.ascontiguousarray(found[:size])


def filled_table(rows: int) -> Table:
    # Spare room, as the table of a server has: a full table looks up every pushed key before it changes anything.
    table = Table(bench_spec(), reserve_rows=rows + 2 * max(SIZES))
    step = 1 << 18
    for start in range(0, rows, step):
        keys = np.arange(start, min(rows, start + step), dtype=np.int64)
        table.push(keys, np.full((keys.size, DIM), 1e-3, np.float32))
    return table


def serve(pipe: Connection, rows: int, folder: Path | None) -> None:
    server = Server(index=0, spec=NodeSpec(), folder=folder, token=_TOKEN)
    server.create(bench_spec())
    server.hold(filled_table(rows))  # not through the log, which would grow to gigabytes
    endpoint = server.start()
    pipe.send((endpoint.host, endpoint.port))
    while True:  # log files are reused, as in any run after its first snapshot
        time.sleep(_RETIRE_S)
        server.retire_log()


def calls_of(pipe: Connection, endpoint: Endpoint, rows: int, seed: int) -> None:
    client = Client(lambda _: endpoint, num_servers=1, token=_TOKEN, client_id=seed)
    client.create(bench_spec())

    def call(kind: Kind, keys: Keys, values: Rows) -> None:
        if kind == "pull":
            client.pull({"bench": keys})
        else:
            client.push({"bench": (keys, values)}, unique=True)

    answer_calls(pipe, call, rows, seed)


def _kernel_calls(pipe: Connection, rows: int) -> None:
    table = filled_table(rows)
    out = np.empty((max(SIZES), DIM), np.float32)

    def call(kind: Kind, keys: Keys, values: Rows) -> None:
        table.pull(keys, out[: keys.size]) if kind == "pull" else table.push(keys, values)

    answer_calls(pipe, call, rows, 4)


def _serve_raw(pipe: Connection) -> None:
    """The same bytes both ways, without any work on them."""
    listening = socket.create_server(("127.0.0.1", 0))
    pipe.send(listening.getsockname()[:2])
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_answer_raw, args=(connection,), daemon=True).start()


def _answer_raw(connection: socket.socket) -> None:
    tune(connection)
    reader, rows = FrameReader(), np.zeros((max(SIZES), DIM), np.float32)
    while True:
        try:
            frame = reader.read(connection)
        except ConnectionError:
            return
        section = frame.sections[0]
        answer = [] if section.values is not None else [TableSection(table=0, values=rows[: section.keys.size])]
        send_frame(connection, Frame(op=Op.OK, sections=answer))


def _raw_calls(pipe: Connection, endpoint: Endpoint) -> None:
    connection, reader = connect(endpoint, timeout_s=60.0), FrameReader()
    out = np.empty((max(SIZES), DIM), np.float32)

    def call(kind: Kind, keys: Keys, values: Rows) -> None:
        given = values if kind == "push" else None
        send_frame(connection, Frame(op=Op.PUSH, sections=[TableSection(table=0, keys=keys, values=given)]))
        reader.read(connection, into=[] if kind == "push" else [out[: keys.size]])

    answer_calls(pipe, call, 1 << 22, 5)
