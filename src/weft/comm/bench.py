"""Times collectives over sizes and algorithms on the ranks of a process group, and counts the bytes that they sent.

    algbw = S / t                     S: the full tensor (of a scatter, all ranks' chunks together)
    busbw = algbw x factor            all_reduce 2 (N - 1) / N; broadcast, reduce 1; the others (N - 1) / N

A time is the median of repeats, each the longest of all ranks after a barrier. Algorithms take turns within a repeat,
so that another job on the machine slows down all of them alike. Sizes are rounded up to whole chunks on every rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import lcm, log2
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.algorithms.costs import predicted_bytes
from weft.comm.algorithms.registry import ALGORITHMS, Algorithm
from weft.comm.algorithms.rounds import CollectiveTask
from weft.comm.fit import LinkFit, Timing, fit_link
from weft.comm.groups import OwnedGroups
from weft.comm.socket_bytes import sent_over_tcp
from weft.comm.wire import Wire

BACKEND = "backend"  # the backend's own algorithm, whichever it chooses


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What is measured."""

    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    sizes: tuple[int, ...]  # bytes
    dtype: str = "float32"
    repeats: int = 7
    per_node: int = 1
    device_type: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """One collective of one size by one algorithm. Bytes sent are those of the busiest rank: of messages, for a backend
    over TCP of its sockets; None for other backends."""

    collective: str
    algorithm: str
    ranks: int
    bytes: int
    seconds: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    bytes_sent_per_rank: int | None
    predicted_bytes_per_rank: int
    equal: bool  # to the backend's result, to the bit: terms are small integers
    seconds_of_repeats: tuple[float, ...]


def run_bench(spec: BenchSpec, *, report: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The rows and the fit, on every rank alike. Collective."""
    owned = OwnedGroups()
    everyone = [list(range(dist.get_world_size()))]
    up, down = (owned.new_partition(everyone, title=f"bench, {way}") for way in ("up", "down"))
    wire = Wire(up, down, device_type=spec.device_type)
    try:
        rows, timings = [], []
        for collective in spec.collectives:
            for size in spec.sizes:
                report(f"{collective}, {size:,} bytes")
                for row, timing in _rows(spec, collective, size, wire):
                    rows.append(row)
                    timings.append(timing)
    finally:
        owned.close()
    return {"rows": [asdict(row) for row in rows], **_fits(rows, timings)}


def bus_factor(collective: str, num_ranks: int) -> float:
    """nccl-tests' factor from the algorithm's bandwidth to that of a link."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    return (2 if collective == "all_reduce" else 1) * (num_ranks - 1) / num_ranks


def _fits(rows: Sequence[BenchRow], timings: Sequence[Timing]) -> dict[str, Any]:
    """`fit`: of the backend's own collectives, which the planner prices; of all messages where it was not measured."""
    by_name: dict[str, list[Timing]] = {}
    for row, timing in zip(rows, timings, strict=True):
        by_name.setdefault(f"{row.collective} {row.algorithm}", []).append(timing)
        by_name.setdefault(row.algorithm if row.algorithm == BACKEND else "", []).append(timing)
    fits = {name: found for name, group in by_name.items() if (found := fit_link(group)) is not None}
    chosen = fits.get(BACKEND) or fits.get("") or LinkFit(alpha_s=0.0, beta_s_per_byte=0.0)
    return {"fit": chosen.as_dict(), "fits": {name: fit.as_dict() for name, fit in fits.items() if " " in name}}


def _rows(spec: BenchSpec, collective: str, size: int, wire: Wire) -> Iterator[tuple[BenchRow, Timing]]:
    dtype = getattr(torch, spec.dtype)
    task = _task(spec, size // dtype.itemsize, wire.size)
    ways = [one for name, one in ALGORITHMS[collective].items() if name in spec.algorithms]
    ways = [one for one in ways if not one.refusal(task.num_ranks, task.per_node)]
    device = torch.device(spec.device_type)
    source = _values(task.count, wire.rank, dtype).to(device)
    own = _backend_run(collective, task, source, wire.rank)
    wanted = own.timed(device).answer
    runs = {BACKEND: own} if BACKEND in spec.algorithms else {}
    runs |= {one.name: _algorithm_run(one, task, source, wire) for one in ways}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    sent: dict[str, int | None] = {}
    equal = {}
    for repeat in range(spec.repeats + 1):  # the first one opens connections
        for name, run in runs.items():
            before = wire.sent_bytes
            found = run.timed(device)
            sent[name] = found.sent if name == BACKEND else wire.sent_bytes - before
            if repeat:
                seconds[name].append(found.seconds)
            else:
                equal[name] = torch.equal(found.answer, wanted)
    for name in runs:
        algorithm = ALGORITHMS[collective].get(name)
        yield _row(spec, collective, task, dtype, name, algorithm, seconds[name], sent[name], equal[name])


def _row(
    spec: BenchSpec,
    collective: str,
    task: CollectiveTask,
    dtype: torch.dtype,
    name: str,
    algorithm: Algorithm | None,
    seconds: list[float],
    sent: int | None,
    equal: bool,
) -> tuple[BenchRow, Timing]:
    median_s, nbytes, ranks = statistics.median(seconds), task.count * dtype.itemsize, task.num_ranks
    factor = bus_factor(collective, ranks)
    if algorithm is None:  # the planner's model of a backend: a ring's bytes, a ring's or a tree's steps
        predicted = round(factor * nbytes)
        timing = Timing(steps=min(ranks - 1, 2 * log2(ranks)), nbytes=predicted, seconds=median_s)
    else:
        predicted = round(predicted_bytes(algorithm, task, itemsize=dtype.itemsize))
        paths = algorithm.path(ranks, task.per_node)
        timing = Timing(
            steps=sum(path.steps for path in paths),
            nbytes=float(sum(path.share for path in paths)) * nbytes,
            seconds=median_s,
        )
    row = BenchRow(
        collective=collective,
        algorithm=name,
        ranks=ranks,
        bytes=nbytes,
        seconds=median_s,
        algorithm_bytes_per_s=nbytes / median_s,
        bus_bytes_per_s=nbytes / median_s * factor,
        bytes_sent_per_rank=None if sent is None else _most(sent, spec.device_type),
        predicted_bytes_per_rank=predicted,
        equal=bool(1 - _most(int(not equal), spec.device_type)),
        seconds_of_repeats=tuple(seconds),
    )
    return row, timing


def _task(spec: BenchSpec, elements: int, num_ranks: int) -> CollectiveTask:
    whole = lcm(num_ranks, 1 << (num_ranks.bit_length() - 1))
    return CollectiveTask(num_ranks=num_ranks, count=-(-max(elements, 1) // whole) * whole, per_node=spec.per_node)


def _values(count: int, rank: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, (count,), generator=draw).to(dtype)  # small integers: sums are exact in every dtype


class _Timed(NamedTuple):
    seconds: float  # of the slowest rank
    sent: int | None  # over sockets
    answer: Tensor


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One way of a collective, on a target that begins as the source."""

    collective: str
    task: CollectiveTask
    rank: int
    source: Tensor
    target: Tensor
    call: Callable[[], object]

    def timed(self, device: torch.device) -> _Timed:
        self.target.copy_(self.source)
        _wait(device)
        dist.barrier()
        before = sent_over_tcp() if device.type == "cpu" else None
        began_s = time.perf_counter()
        self.call()
        _wait(device)
        took_s = time.perf_counter() - began_s
        sent = sent_over_tcp() - before if before is not None else None  # type: ignore[operator]
        slowest = torch.tensor(took_s, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return _Timed(float(slowest), sent, _answer(self.collective, self.task, self.target, self.rank))


def _algorithm_run(algorithm: Algorithm, task: CollectiveTask, source: Tensor, wire: Wire) -> _Run:
    target = source.clone()
    given = target if algorithm.in_place else source
    return _Run(
        collective=algorithm.collective,
        task=task,
        rank=wire.rank,
        source=source,
        target=target,
        call=lambda: wire.run(algorithm, task, given, target),
    )


def _backend_run(collective: str, task: CollectiveTask, source: Tensor, rank: int) -> _Run:
    """The backend's own collective."""
    target = source.clone()
    chunks = [source[slice(*task.chunk(peer))] for peer in range(task.num_ranks)]
    parts = [target[slice(*task.chunk(peer))] for peer in range(task.num_ranks)]
    is_root, own = rank == task.root, chunks[rank]
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(target, src=task.root),
        "reduce": lambda: dist.reduce(target, dst=task.root),
        "all_reduce": lambda: dist.all_reduce(target),
        "scatter": lambda: dist.scatter(parts[rank], chunks if is_root else None, src=task.root),
        "gather": lambda: dist.gather(own, parts if is_root else None, dst=task.root),
        "all_gather": lambda: dist.all_gather(parts, own),
        "reduce_scatter": lambda: dist.reduce_scatter(parts[rank], chunks),
        "all_to_all": lambda: dist.all_to_all_single(target, source),
    }
    return _Run(collective=collective, task=task, rank=rank, source=source, target=target, call=calls[collective])


def _answer(collective: str, task: CollectiveTask, target: Tensor, rank: int) -> Tensor:
    """The elements that the collective defines on this rank."""
    if collective in ("scatter", "reduce_scatter"):
        return target[slice(*task.chunk(rank))]
    if collective in ("gather", "reduce") and rank != task.root:
        return target[:0]
    return target


def _most(number: int, device_type: str) -> int:
    most = torch.tensor(number, dtype=torch.int64, device=device_type)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
