"""`RankStatus`: a rank's published status: process, phase, collectives, stack.

Plain data with a JSON form; `watch` writes and reads it, `stalls` evaluates it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field

from weft.comm.flight import GroupTrace, Issued, group_traces, is_pending
from weft.comm.messages import awaited
from weft.core.processes import start_of
from weft.train.ranks.progress import main_calls, main_stack, progress

_WAITS = "/torch/distributed/"


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """`groups` and `stack` are only in the full answer to another rank: they take longer to collect."""

    rank: int
    host: str
    pid: int
    process_start: int
    time: float
    phase: str
    phase_since: float
    is_slow_phase: bool = False
    stack_file: str = ""  # on its host: where C code writes its stack when Python cannot
    groups: dict[str, GroupTrace] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    is_waiting: bool = False
    message: str = ""  # the message between pipeline stages that it waits for
    message_peer: int = -1

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        fields = json.loads(text)
        groups = {key: _trace(trace) for key, trace in fields.pop("groups").items()}
        return cls(**{**fields, "stack": tuple(fields["stack"])}, groups=groups)


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What another process of its host sees of a rank that does not answer."""

    rank: int
    state: str = ""  # a clause: "it is stopped (state T)"
    stack: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Observation:
        fields = json.loads(text)
        return cls(**{**fields, "stack": tuple(fields["stack"])})


def own_status(rank: int, *, in_full: bool, stack_file: str = "") -> RankStatus:
    """The current status of this rank."""
    message = awaited() if in_full else None
    return RankStatus(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=start_of(os.getpid()),
        time=time.time(),
        phase=progress.phase,
        phase_since=progress.since,
        is_slow_phase=progress.is_slow,
        stack_file=stack_file,
        groups=group_traces() if in_full else {},
        stack=tuple(main_stack()) if in_full else (),
        is_waiting=in_full and is_waiting(),
        message=message.what if message is not None else "",
        message_peer=message.peer if message is not None else -1,
    )


def is_waiting() -> bool:
    """Whether this rank waits for another one: for a message, or in a collective that is not complete."""
    return awaited() is not None or is_pending() or any(_WAITS in call.filename for call in main_calls()[-4:])


def _trace(fields: dict[str, object]) -> GroupTrace:
    last = tuple(Issued(**issued) for issued in fields["last"])  # type: ignore[attr-defined]
    return GroupTrace(title=str(fields["title"]), ranks=tuple(fields["ranks"]), last=last)  # type: ignore[arg-type]
