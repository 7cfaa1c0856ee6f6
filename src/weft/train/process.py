"""What a rank does around its work: join the others, leave them, and say what went wrong.

It trains nothing and starts no process (`weft.launch` does). The order in a worker's main:

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

from weft.core.errors import DeviceError, WeftError
from weft.train.failures import FailureRecord, is_debugging, phase, record_failure, write_record
from weft.train.launcher_death import end_with_launcher
from weft.train.preparation import prepare_together
from weft.train.rank_environment import SCRATCH_VARIABLE, Meeting, Process, read_meeting, read_process
from weft.train.rank_store import open_store
from weft.train.rank_watch import RankWatch
from weft.train.stop_flag import StopFlag

__all__ = ["Process", "StopFlag", "join", "leave", "phase", "report_failures"]


@dataclass(frozen=True, kw_only=True)
class _Membership:
    """The group that `join` made: torch keeps one group a process, so this is one a process too."""

    process: Process
    lent_variables: tuple[str, ...]


_membership: _Membership | None = None
_watch: RankWatch | None = None  # from before the group is made, so that ranks that never join are named too
_depth = 0  # joins not yet left: a run inside a verification leaves the verification's group alone


def join(
    *,
    device_type: Literal["auto", "cpu", "cuda"] = "auto",
    timeout_s: float = 300.0,
    prepare: Callable[[Process], object] | None = None,
) -> Process:
    """Joins this rank to the others and returns its place; one rank alone gets a group of its own.

    It is `weft.join`, for scripts of your own under torchrun or Slurm. "auto": a GPU for each rank where there are any.
    A process group that exists already is taken as it is, and `leave` will not destroy it.
    `prepare` opens the data: before there is a group, so that it may take longer than any collective.
    """
    global _membership, _watch, _depth
    if dist.is_initialized():
        _depth += 1
        return _membership.process if _membership else _describe_existing_group()
    with phase("join"):
        end_with_launcher(os.environ)
        process = read_process(os.environ)
        _write_pid(process)
        meeting = read_meeting(os.environ, world_size=process.world_size)
        lent = _stay_local() if meeting is None else ()
        device = _take_device(process, device_type=_kind_of_device(device_type))
        store = open_store(meeting, process=process, timeout_s=timeout_s)
        _watch = _start_watch(store, meeting, process, timeout_s=timeout_s)
        if prepare is not None:
            with phase("opening the data"):
                prepare_together(lambda: prepare(process), store, process=process, timeout_s=timeout_s)
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
    """Destroys the group that the outermost `join` made. Call it after the work, once for each `join`."""
    global _membership, _watch, _depth
    _depth = max(0, _depth - 1)
    # While an error is under way the group must live on: closing it would make the peers fail, and report, first.
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


@contextmanager
def report_failures() -> Iterator[None]:
    """Around a worker's whole main: an exception is written down for the launcher, or told, and ends the process.

    Exit code: the error's own (2 bad input, 3 a failure while running). A rank that only lost its peers names the one
    that did not arrive; under torchrun or Slurm it reports the first error that any rank published, not its own.
    """
    try:
        yield
    except Exception as error:
        record = record_failure(error, process=_who_am_i())
        if _watch is not None:
            record = _watch.settle(record, error)
        if scratch := os.environ.get(SCRATCH_VARIABLE):
            write_record(record, scratch=Path(scratch))
        else:
            _tell(record)
        _end_at_once(record.exit_code)


def _start_watch(store: Store, meeting: Meeting | None, process: Process, *, timeout_s: float) -> RankWatch | None:
    if meeting is None or process.world_size == 1:
        return None
    # Under our launcher the launcher ends all ranks, after it has heard from each.
    end = None if SCRATCH_VARIABLE in os.environ else _end_with
    address = f"{meeting.address}:{meeting.port}"
    watch = RankWatch(store, process, address=address, timeout_s=timeout_s, end=end)
    watch.start()
    return watch


def _end_with(record: FailureRecord) -> None:
    _tell(record)
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
            f"GPU {process.local_rank} is needed, but this host shows {num_devices}.",
            hint="start at most one rank a GPU, or train on the CPU",
        )
    device = torch.device("cuda", process.local_rank)
    torch.cuda.set_device(device)
    return device


def _stay_local() -> tuple[str, ...]:
    # Gloo and NCCL listen even for one rank; without this on the host's outward address.
    if sys.platform != "linux":
        return ()
    lent = tuple(name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ)
    os.environ.update(dict.fromkeys(lent, "lo"))
    return lent


def _write_pid(process: Process) -> None:
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        Path(scratch, f"pid-{process.rank}").write_text(f"{os.getpid()}\n", encoding="utf-8")


def _who_am_i() -> Process:
    if _membership is not None:
        return _membership.process
    try:
        return read_process(os.environ)
    except WeftError:  # the environment itself is the failure being reported
        return Process(rank=0, local_rank=0, world_size=1, restart_count=0)


def _tell(record: FailureRecord) -> None:
    error = record.to_error()
    lines = [f"error [{error.code}]: {error.message}"]
    if error.hint:
        lines.append(f"hint: {error.hint}")
    if is_debugging():
        lines.append(record.traceback)
    print("\n".join(lines), file=sys.stderr, flush=True)


def _end_at_once(exit_code: int) -> NoReturn:
    # Not by way of the interpreter's end: a save or loader thread that waits for a dead peer would keep the failed
    # rank, and so the job, alive; and the group's own threads, torn down while they wait, end in "terminate called".
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
