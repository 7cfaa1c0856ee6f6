"""Failure records of ranks: the error, the phase, the time, and whether another rank's failure caused it.

This module does not decide about the job (`weft.launch.cause` does) and ends no process.

    secondary = some exception of the chain reports that a peer disconnected or did not answer
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.core.disk import disk_full, is_full
from weft.core.errors import MemoryLimitError, RankError, StallError, WeftError, error_from_dict
from weft.train.ranks.environment import SCRATCH_VARIABLE, Process, read_process
from weft.train.ranks.progress import progress

DEBUG_VARIABLE = "WEFT_DEBUG"
_PHASE_ATTRIBUTE = "__weft_phase__"

# Messages of Gloo, NCCL and the store about a lost peer. Lower case; compared as substrings.
_PEER_GONE = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "wait timeout",
    "failed to recv",
    "failed to send",
    "connectfullmesh failed",
    "communicator was aborted",
    "remote process exited",
)
_MESH_HINT = (
    "ranks must reach one another: set GLOO_SOCKET_IFNAME to the interface on the network of all hosts (`ip -br"
    " address`), and see that no firewall is between them"
)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """One rank's failure. Its JSON form is flat: the error's own fields beside rank, phase, time, traceback."""

    rank: int
    world_size: int
    phase: str
    time: float
    secondary: bool
    traceback: str
    error_fields: dict[str, str | int]

    @property
    def exit_code(self) -> int:
        return int(self.error_fields["exit_code"])

    def to_error(self, *, host: str = "") -> WeftError:
        """The rank's error in its own class; with several ranks the message adds rank, host and phase."""
        error = error_from_dict(self.error_fields)
        if self.world_size == 1 or isinstance(error, StallError):  # a stall names another rank than this one
            return error
        who = f"rank {self.rank} on {host}" if host else f"rank {self.rank}"
        if isinstance(error, MemoryLimitError) and self.phase in error.message:  # the message has the phase already
            return type(error)(f"{who} ran {error.message}", hint=error.hint)
        return type(error)(f"{who} failed in {self.phase}: {error.message}", hint=error.hint)

    def to_json(self) -> str:
        beside = {name: value for name, value in vars(self).items() if name != "error_fields"}
        return json.dumps({**self.error_fields, **beside})

    @classmethod
    def from_json(cls, text: str) -> FailureRecord:
        fields = json.loads(text)
        names = ("rank", "world_size", "phase", "time", "secondary", "traceback")
        return cls(**{name: fields.pop(name) for name in names}, error_fields=fields)


def record_failure(error: Exception, *, process: Process) -> FailureRecord:
    """The record of an exception that ends this rank."""
    return FailureRecord(
        rank=process.rank,
        world_size=process.world_size,
        phase=phase_of(error),
        time=time.time(),
        secondary=is_secondary(error),
        traceback="".join(traceback.format_exception(error)),
        error_fields=as_weft_error(error).as_dict(),
    )


@contextmanager
def phase(name: str, *, is_slow: bool = False) -> Iterator[None]:
    """Name the rank's current activity ("build", "step 12", "save") for error messages; the innermost name is used.

    `is_slow`: one rank may take minutes longer than others (a disk, a compiler), so no wait for it is a hang."""
    progress.enter(name, is_slow=is_slow)
    try:
        yield
    except Exception as error:
        # On the exception and not in a global, so that a caught error leaves no stale phase behind.
        if not hasattr(error, _PHASE_ATTRIBUTE):
            set_phase(error, name)
        raise
    finally:
        progress.leave()


def set_phase(error: Exception, name: str) -> None:
    setattr(error, _PHASE_ATTRIBUTE, name)


def phase_of(error: Exception) -> str:
    """The phase in which the exception was raised."""
    return str(getattr(error, _PHASE_ATTRIBUTE, "start"))


def as_weft_error(error: Exception) -> WeftError:
    """The error as a WeftError: itself, disk full, out of memory, or a RankError with the exception's first line."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, OSError) and is_full(error):
        return disk_full(error)
    lines = str(error).strip().splitlines()
    first_line = lines[0] if lines else "(no message)"
    if is_out_of_memory(error):
        return MemoryLimitError(first_line, hint="use a smaller micro-batch, recompute activations, or more ranks")
    hint = (
        _MESH_HINT
        if "connectfullmesh failed" in first_line.lower()
        else f"set {DEBUG_VARIABLE}=1 to see the stack trace"
    )
    return RankError(f"{type(error).__name__}: {first_line}", hint=hint)


def is_secondary(error: BaseException) -> bool:
    """Whether the error, or one it was raised from, reports a lost peer."""
    return any(any(sign in str(link).lower() for sign in _PEER_GONE) for link in _chain(error))


def is_timeout(error: BaseException) -> bool:
    """Whether a peer did not answer in time; otherwise its connection ended."""
    return any("timed out" in str(link).lower() or "timeout" in str(link).lower() for link in _chain(error))


def write_record(record: FailureRecord, *, scratch: Path) -> None:
    """Write `error-<rank>.json` atomically: the launcher may read at any moment."""
    path = record_path(scratch, rank=record.rank)
    draft = path.with_suffix(".tmp")
    draft.write_text(record.to_json(), encoding="utf-8")
    draft.replace(path)


def report_before_joining(error: WeftError) -> None:
    """Record an error of a launched rank that never joined the others: bad input, mostly."""
    record = record_failure(error, process=read_process(os.environ))
    write_record(record, scratch=Path(os.environ[SCRATCH_VARIABLE]))


def read_record(scratch: Path, *, rank: int) -> FailureRecord | None:
    """The rank's failure record, or None."""
    try:
        return FailureRecord.from_json(record_path(scratch, rank=rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def record_path(scratch: Path, *, rank: int) -> Path:
    return scratch / f"error-{rank}.json"


def is_debugging() -> bool:
    """Whether the user asked for stack traces."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or link.__context__


def is_out_of_memory(error: Exception) -> bool:
    """Whether a GPU's allocator, the CPU's, or Python itself ran out of memory."""
    import torch

    # the message differs by machine: "can't allocate memory", and on ARM "not enough memory"
    is_cpu_allocator = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return is_cpu_allocator or isinstance(error, (torch.OutOfMemoryError, MemoryError))
