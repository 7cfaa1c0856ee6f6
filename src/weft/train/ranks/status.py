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

from weft.comm.flight import GroupTrace, Issued, group_traces
from weft.core.processes import start_of
from weft.train.ranks.progress import is_main_waiting, main_stack, progress


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
    groups: dict[str, GroupTrace] = field(default_factory=dict)
    stack: tuple[str, ...] = ()
    is_waiting: bool = False  # in torch.distributed or for a p2p message, according to Python's stack

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        fields = json.loads(text)
        groups = {key: _trace(trace) for key, trace in fields.pop("groups").items()}
        return cls(**{**fields, "stack": tuple(fields["stack"])}, groups=groups)


def own_status(rank: int, *, in_full: bool) -> RankStatus:
    """The current status of this rank."""
    return RankStatus(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        process_start=start_of(os.getpid()),
        time=time.time(),
        phase=progress.phase,
        phase_since=progress.since,
        groups=group_traces() if in_full else {},
        stack=tuple(main_stack()) if in_full else (),
        is_waiting=in_full and is_main_waiting(),
    )


def _trace(fields: dict[str, object]) -> GroupTrace:
    last = tuple(Issued(**issued) for issued in fields["last"])  # type: ignore[attr-defined]
    return GroupTrace(title=str(fields["title"]), ranks=tuple(fields["ranks"]), last=last)  # type: ignore[arg-type]
