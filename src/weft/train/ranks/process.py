"""A rank's process group and failure reports: join the other ranks, leave them, report errors.

This module trains nothing and starts no process (`weft.launch` does). The order in a worker's main:

    with report_failures(), StopFlag() as stop:
        process = join(device_type="cpu", timeout_s=300)
        ...                    # with phase("step 12"): ...
        leave()
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from weft.comm.flight import begin_world
from weft.core.errors import DeviceError, WeftError
from weft.train.ranks.address import SOCKET_VARIABLES, socket_interface, with_known_address
from weft.train.ranks.environment import (
    SCRATCH_VARIABLE,
    Process,
    Rendezvous,
    allocator_defaults,
    read_local_size,
    read_process,
    read_rendezvous,
)
from weft.train.ranks.failures import FailureRecord, is_debugging, phase, record_failure, write_record
from weft.train.ranks.launcher_death import end_with_launcher
from weft.train.ranks.pace import Paces
from weft.train.ranks.preparation import prepare_together
from weft.train.ranks.stop_flag import StopFlag
from weft.train.ranks.store import open_store
from weft.train.ranks.watch import Patience, RankWatch

__all__ = ["Process", "StopFlag", "join", "leave", "phase", "report_failures"]


@dataclass(frozen=True, kw_only=True)
class _Membership:
    """The group that `join` created: one per process, as torch's default group is."""

    process: Process
    lent_variables: tuple[str, ...]


_membership: _Membership | None = None
_watch: RankWatch | None = None  # starts before the group, so that ranks that never join are named too
_depth = 0  # joins without a leave: a run inside a verification must not destroy the verification's group


def join(
    *,
    device_type: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 300.0,
    hang_timeout_s: float = 120.0,
    prepare: Callable[[Process], object] | None = None,
) -> Process:
    """Join this rank to the others and return its `Process`; a single rank gets its own group.

    It is `weft.join`, for your own scripts under torchrun or Slurm. "auto": one GPU per rank if there are any. An
    existing process group is used as it is, and `leave` will not destroy it.
    A wait for another rank in a `phase` that is not slow is a hang after `hang_timeout_s`; any collective fails after
    `timeout_s`. `prepare` opens the data before the group exists, so that it may take longer than any collective.
    """
    global _membership, _watch, _depth
    if dist.is_initialized():
        _depth += 1
        return _membership.process if _membership else _describe_existing_group()
    with phase("join", is_slow=True):
        end_with_launcher(os.environ)
        process = read_process(os.environ)
        _write_pid(process)
        rendezvous = read_rendezvous(os.environ, world_size=process.world_size)
        if rendezvous is not None:
            rendezvous = with_known_address(rendezvous, os.environ)
        lent = _lend_interface(rendezvous, process)
        device = _take_device(process, device_type=_kind_of_device(device_type))
        store = open_store(rendezvous, process=process, timeout_s=timeout_s)
        _watch = _start_watch(store, rendezvous, process, patience=Patience(timeout_s=timeout_s, hang_s=hang_timeout_s))
        if prepare is not None:
            with phase("opening the data", is_slow=True):
                prepare_together(lambda: prepare(process), store, process=process, timeout_s=timeout_s)
        begin_world()
        dist.init_process_group(
            "gloo" if device is None else "cpu:gloo,cuda:nccl",
            store=store,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
    _membership, _depth = _Membership(process=process, lent_variables=lent), 1
    return process


def leave() -> None:
    """Destroy the group that the outermost `join` created. Call it after the work, once per `join`."""
    global _membership, _watch, _depth
    _depth = max(0, _depth - 1)
    # While an exception propagates the group must stay: closing it would make the peers fail and report first.
    if _depth > 0 or _membership is None or sys.exception() is not None:
        return
    for name in _membership.lent_variables:
        os.environ.pop(name, None)
    _membership = None
    if _watch is not None:
        _watch.stop()
        _watch = None
    if dist.is_initialized():
        dist.destroy_process_group()


def paces() -> Paces | None:
    """How long all ranks work and wait; None for one rank. Only rank 0 knows."""
    return _watch.paces if _watch is not None else None


@contextmanager
def report_failures() -> Iterator[None]:
    """Wrap a worker's main: record an exception for the launcher, or print it, and end the process.

    Exit code: the error's own (2 bad input, 3 a failure while running). A rank that only lost its peers names the rank
    that did not arrive; under torchrun or Slurm it reports the first error that any rank published, not its own.
    """
    try:
        yield
    except Exception as error:
        record = record_failure(error, process=_own_process())
        if _watch is not None:
            record = _watch.final_record(record, error)
        _end_with(record)


def _start_watch(
    store: Store, rendezvous: Rendezvous | None, process: Process, *, patience: Patience
) -> RankWatch | None:
    if rendezvous is None or process.world_size == 1:
        return None
    scratch = os.environ.get(SCRATCH_VARIABLE)
    watch = RankWatch(
        store,
        process,
        address=f"{rendezvous.address}:{rendezvous.port}",
        patience=patience,
        end=_end_with,
        is_launched=scratch is not None,
        folder=Path(scratch) if scratch is not None else None,
    )
    watch.start()
    return watch


def _end_with(record: FailureRecord) -> NoReturn:
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        write_record(record, scratch=Path(scratch))
    else:
        _print_error(record)
    _end_at_once(record.exit_code)


def _describe_existing_group() -> Process:
    rank = dist.get_rank()
    return Process(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=dist.get_world_size(),
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


def _kind_of_device(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def _take_device(process: Process, *, device_type: str) -> torch.device | None:
    if device_type == "cpu":
        return None
    num_devices = torch.cuda.device_count()
    if process.local_rank >= num_devices:
        raise DeviceError(
            f"local rank {process.local_rank} needs GPU {process.local_rank}, but this host has {num_devices} GPUs",
            hint="start at most one rank per GPU, or train on the CPU",
        )
    device = torch.device("cuda", process.local_rank)
    os.environ.update(allocator_defaults(os.environ))  # of ranks that torchrun or Slurm started; read at first use
    torch.cuda.set_device(device)
    return device


def _lend_interface(rendezvous: Rendezvous | None, process: Process) -> tuple[str, ...]:
    lent = tuple(name for name in SOCKET_VARIABLES if name not in os.environ)
    if sys.platform != "linux" or not lent:
        return ()
    if rendezvous is None:  # Gloo and NCCL listen even for one rank; without this on the host's external address
        interface: str | None = "lo"
    else:
        is_known = "LOCAL_WORLD_SIZE" in os.environ or "RANK" not in os.environ  # a script may not say
        is_one_host = is_known and read_local_size(os.environ) == process.world_size
        interface = socket_interface(rendezvous, is_one_host=is_one_host)
    if interface is None:
        return ()
    os.environ.update(dict.fromkeys(lent, interface))
    return lent


def _write_pid(process: Process) -> None:
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        Path(scratch, f"pid-{process.rank}").write_text(f"{os.getpid()}\n", encoding="utf-8")


def _own_process() -> Process:
    if _membership is not None:
        return _membership.process
    try:
        return read_process(os.environ)
    except WeftError:  # the environment itself is the failure being reported
        return Process(rank=0, local_rank=0, world_size=1, restart_count=0)


def _print_error(record: FailureRecord) -> None:
    error = record.to_error()
    lines = [f"error [{error.code}]: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    if is_debugging():
        lines.append(record.traceback)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end_at_once(exit_code: int) -> NoReturn:
    # Without interpreter shutdown: a save or loader thread that waits for a dead peer would keep the failed rank, and
    # so the job, alive; and the group's threads, torn down while they wait, end in "terminate called".
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
