"""Dry runs in processes of their own: the same figures, errors as values, nothing left; and what stands for many.

One set of processes serves the whole file: each imports torch once.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache

import pytest

from weft.core.errors import BatchError, MeshError, RunError, WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun import many
from weft.dryrun.many import DryRunJob, dry_runs, usual_workers, worker_processes
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run

RUN = RunSpec.from_tables(
    {
        "model": {
            "type": "llama",
            "config": {
                "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 512,
            },
        },
        "data": {"sequence_length": 64},
        "train": {"global_batch": 8},
    }
)  # fmt: skip


def plan_of(zero: int, microbatches: int = 1) -> Plan:
    axis = "dp_shard" if zero else "dp_replicate"
    return Plan.from_tables(
        {"mesh": {axis: 2}, "data_parallel": {"zero": zero}, "pipeline": {"microbatches": microbatches},
         "precision": {"preset": "bf16"}}
    )  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with worker_processes(2) as found:
        yield found


def same(left: DryRun, right: DryRun) -> bool:
    return replace(left, elapsed_s=0.0, notes=()) == replace(right, elapsed_s=0.0, notes=())


@pytest.mark.extended
def test_figures_are_those_of_one_process_in_the_order_asked(processes: ProcessPoolExecutor) -> None:
    jobs = [DryRunJob(run=RUN, plan=plan_of(3), rank=1), DryRunJob(run=RUN, plan=plan_of(0), rank=1, on_gpu=False)]
    heard: dict[int, DryRun | WeftError] = {}
    found = dry_runs(jobs, on_done=heard.__setitem__, processes=processes)
    for job, outcome in zip(jobs, found, strict=True):
        assert isinstance(outcome, DryRun)
        assert same(outcome, dry_run(job.run, job.plan, rank=1, on_gpu=job.on_gpu))
    assert [heard[0], heard[1]] == found


@cache
def whole_step(zero: int) -> DryRun:
    """Four micro-batches, all of them run."""
    return dry_run(RUN, plan_of(zero, microbatches=4))


@pytest.mark.parametrize("zero", [3, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (0, 1, 2))])
def test_two_short_steps_stand_for_a_long_one(zero: int, processes: ProcessPoolExecutor) -> None:
    (found,) = dry_runs([DryRunJob(run=RUN, plan=plan_of(zero, microbatches=4))], processes=processes)
    assert isinstance(found, DryRun)
    whole = whole_step(zero)
    assert "extrapolated to 4 micro-batches" in found.notes[-1]
    assert found.peak_bytes == whole.peak_bytes
    assert found.terms == whole.terms
    assert found.traffic == whole.traffic
    assert found.flops == whole.flops
    assert found.reserved_bytes == pytest.approx(whole.reserved_bytes, rel=0.02)


def test_memory_alone_takes_one_short_step(processes: ProcessPoolExecutor) -> None:
    (found,) = dry_runs([DryRunJob(run=RUN, plan=plan_of(3, microbatches=4), memory_only=True)], processes=processes)
    assert isinstance(found, DryRun)
    assert found.peak_bytes == pytest.approx(whole_step(3).peak_bytes, rel=0.02)
    assert (found.traffic, found.flops) == ([], 0)


def test_errors_are_values_and_do_not_stop_the_others(processes: ProcessPoolExecutor) -> None:
    jobs = [
        DryRunJob(run=RUN, plan=plan_of(3), rank=2),
        DryRunJob(run=RUN, plan=plan_of(3)),
        DryRunJob(run=RUN, plan=plan_of(3, 3)),
    ]
    outside, fine, uneven = dry_runs(jobs, processes=processes)
    assert isinstance(outside, MeshError)
    assert outside.hint == "ranks are 0 to 1"
    assert isinstance(fine, DryRun)
    assert isinstance(uneven, BatchError)


def test_an_interrupt_ends_the_processes() -> None:
    before = set(multiprocessing.active_children())

    def interrupt(place: int, outcome: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_runs([DryRunJob(run=RUN, plan=plan_of(3), rank=9)], on_done=interrupt)
    assert set(multiprocessing.active_children()) <= before


def test_a_process_that_is_killed_is_an_error() -> None:
    future: Future[DryRun | WeftError] = Future()
    future.set_exception(BrokenProcessPool())
    found = many._outcome(future)
    assert isinstance(found, RunError)
    assert "was killed" in found.message


def test_there_is_a_worker_for_each_core() -> None:
    assert usual_workers() >= 1
    assert dry_runs([]) == []
