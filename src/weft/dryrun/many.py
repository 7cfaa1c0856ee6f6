"""Concurrent dry runs, each in its own process, one per core.

A dry run uses one core and patches torch while it runs, so threads would neither help nor be safe. Processes are
spawned, never forked (torch has threads), compute on one thread each, and end with the caller. Importing this module
does not import torch: only the processes do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from weft.core.cluster import Device
from weft.core.errors import RunError, WeftError
from weft.core.plan import Plan
from weft.core.quiet import quiet_libraries
from weft.core.run_spec import RunSpec
from weft.dryrun.alike import FEW, MORE, are_alike, extended, shortened, stands_for
from weft.dryrun.fit import attention_of, is_cpu
from weft.dryrun.record import DryRun


@dataclass(frozen=True, kw_only=True)
class DryRunJob:
    """One rank of one plan."""

    run: RunSpec
    plan: Plan
    rank: int = 0
    on_gpu: bool = True
    attention: Literal["cudnn", "flash"] = "cudnn"
    imbalance: float = 1.0  # of routers: tokens of the rank's experts, times those of an even one
    memory_only: bool = False  # half the work with many micro-batches: no traffic and FLOPs

    @staticmethod
    def on(device: Device | None, run: RunSpec, plan: Plan, *, rank: int = 0, memory_only: bool = False) -> DryRunJob:
        """A job with the device's kernels; with those of a Hopper GPU for None."""
        if device is None:
            return DryRunJob(run=run, plan=plan, rank=rank, memory_only=memory_only)
        return DryRunJob(
            run=run,
            plan=plan,
            rank=rank,
            on_gpu=not is_cpu(device),
            attention=attention_of(device),
            memory_only=memory_only,
        )


Outcome = DryRun | WeftError


def dry_runs(
    jobs: Sequence[DryRunJob],
    *,
    on_done: Callable[[int, Outcome], None] | None = None,
    processes: ProcessPoolExecutor | None = None,
) -> list[Outcome]:
    """The result of `dry_run` for each job, or its error, in order. `on_done` is called as each ends.

    A job with many micro-batches is two short dry runs (see `alike`). `processes` come from `worker_processes`, if
    several calls share them: each process imports torch only once.
    """
    parts = [_parts(job) for job in jobs]
    if processes is None:
        with worker_processes(min(usual_workers(), sum(map(len, parts)))) as own:
            return _collected(own, jobs, parts, on_done)
    return _collected(processes, jobs, parts, on_done)


def _collected(
    processes: ProcessPoolExecutor,
    jobs: Sequence[DryRunJob],
    parts: list[list[DryRunJob]],
    on_done: Callable[[int, Outcome], None] | None,
) -> list[Outcome]:
    places = {
        processes.submit(_carry_out, part): (place, index)
        for place, of_job in enumerate(parts)
        for index, part in enumerate(of_job)
    }
    done: list[dict[int, Outcome]] = [{} for _ in jobs]
    found: dict[int, Outcome] = {}
    for future in as_completed(places):
        place, index = places[future]
        done[place][index] = _outcome(future)
        if len(done[place]) == len(parts[place]):
            found[place] = _joined(processes, jobs[place], [done[place][one] for one in sorted(done[place])])
            if on_done is not None:
                on_done(place, found[place])
    return [found[place] for place in range(len(jobs))]


@contextmanager
def worker_processes(count: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """A pool of `count` processes, by default one per core; after an error they are terminated at once."""
    before = {process.pid for process in multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")
    size = max(1, usual_workers() if count is None else count)
    executor = ProcessPoolExecutor(max_workers=size, mp_context=context, initializer=_prepare)
    try:
        yield executor
    except BaseException:  # Ctrl-C must not wait for a dry run of a minute
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.terminate()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _parts(job: DryRunJob) -> list[DryRunJob]:
    if not are_alike(job.run, job.plan):
        return [job]
    counts = (FEW,) if job.memory_only else (FEW, MORE)
    short = [shortened(job.run, job.plan, microbatches=count) for count in counts]
    return [replace(job, run=run, plan=plan) for run, plan in short]


def _joined(processes: ProcessPoolExecutor, job: DryRunJob, done: list[Outcome]) -> Outcome:
    found = [outcome for outcome in done if isinstance(outcome, DryRun)]
    if len(found) < len(done):
        return next(outcome for outcome in done if isinstance(outcome, WeftError))
    if len(found) == 1:
        return replace(found[0], traffic=[], flops=0) if job.memory_only else found[0]
    if not stands_for(*found):
        return _outcome(processes.submit(_carry_out, job))
    return extended(*found, microbatches=job.plan.pipeline.microbatches)


def usual_workers() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare() -> None:
    """Initialise a worker process before torch is imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends Ctrl-C to all; only the caller handles it
    os.environ["OMP_NUM_THREADS"] = "1"
    quiet_libraries()


def _carry_out(job: DryRunJob) -> DryRun | WeftError:
    """Run a job; errors are returned as values, since one that cannot be pickled would break the pool."""
    from weft.dryrun.run import dry_run

    try:
        return dry_run(
            job.run, job.plan, rank=job.rank, on_gpu=job.on_gpu, attention=job.attention, imbalance=job.imbalance
        )
    except WeftError as error:
        return error
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return WeftError(f"{type(error).__name__}: {first}", hint="this is a bug in weft; please report it")


def _outcome(future: Future[DryRun | WeftError]) -> DryRun | WeftError:
    try:
        return future.result()
    except BrokenProcessPool:
        return RunError("a dry run's process was killed", hint="often for lack of memory: free some, or run fewer")
