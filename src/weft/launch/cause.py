"""The rank whose failure caused the others: the one error that the launcher raises.

The input is a list of `RankEnd`s from the agent. The order of precedence, strongest first:

    bad input  >  killed by a signal  >  own exception  >  named the rank that did not arrive
               >  aborted, or left without a word  >  lost its peers

A killed rank writes no record, and "connection reset" of its peers often arrives first: so precedence goes before time.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from weft.core.errors import RankError, StallError, WeftError
from weft.core.processes import signal_name
from weft.train.ranks import stall_words as words
from weft.train.ranks.failures import FailureRecord

_NAMED_ANOTHER, _SILENT, _LOST_PEERS = 3, 4, 5


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The state of a rank: `exit_code` is None while it runs, negative if a signal ended it. `host`: of several."""

    rank: int
    pid: int
    exit_code: int | None
    killed_by_launcher: bool
    record: FailureRecord | None
    stack: tuple[str, ...] = ()  # of its main thread when a fatal signal ended it, innermost first
    host: str = ""

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], *, host: str) -> Self:
        record = FailureRecord(**fields["record"]) if fields["record"] is not None else None
        return cls(**{**fields, "record": record, "stack": tuple(fields["stack"]), "host": host})

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    @property
    def has_failed(self) -> bool:
        # A record counts before the exit: a failed rank may linger for minutes in threads that wait for its peers.
        return self.record is not None or (self.exit_code not in (None, 0) and not self.killed_by_launcher)

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it; not SIGABRT, by which communication libraries give up on lost peers."""
        return self.record is None and (self.exit_code or 0) < 0 and self.exit_code != -signal.SIGABRT


def find_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The rank whose failure explains the others'."""
    failed = [end for end in ends if end.has_failed]
    return min(failed, key=_belief, default=None)


def is_certain(cause: RankEnd | None) -> bool:
    """Whether the end of more ranks could not change the cause."""
    return cause is not None and _belief(cause)[0] <= 2


def has_named(cause: RankEnd) -> bool:
    """Whether the rank has named another one that did not arrive."""
    return _belief(cause)[0] == _NAMED_ANOTHER


def judge(ends: Sequence[RankEnd], *, num_stops: int) -> WeftError:
    """The error of a generation that failed, or that was asked to stop and was killed."""
    cause = find_cause(ends)
    if cause is None or num_stops > 1:
        why = "stopped by a second signal" if num_stops > 1 else "stopped, and a rank could not be woken"
        return RankError(
            f"{why}: the ranks were killed while they were ending", hint="--resume continues from the last checkpoint"
        )
    if num_stops and cause.exit_code == -signal.SIGTERM and cause.record is None:
        return RankError("stopped before the ranks were ready; nothing was saved")
    return describe(cause, num_ranks=len(ends))


def describe(cause: RankEnd, *, num_ranks: int) -> WeftError:
    """The cause as the error of the launcher."""
    if cause.record is not None:
        return cause.record.to_error(host=cause.host)
    where = f" on {cause.host}" if cause.host else ""
    who = f"rank {cause.rank}{where} (pid {cause.pid})" if num_ranks > 1 else f"the process (pid {cause.pid}){where}"
    code = cause.exit_code or 0
    if code < 0:
        at = words.at(cause.stack)
        return RankError(f"{who} was killed by {signal_name(-code)}{at}", hint=_signal_hint(-code))
    return RankError(
        f"{who} ended with exit code {code} and left no error message",
        hint="see its output above; it may have ended before training began",
    )


def _belief(end: RankEnd) -> tuple[int, float, int]:
    record = end.record
    if record is not None:
        return (_belief_in(record), record.time, end.rank)
    return (1 if end.is_killed else _SILENT, 0.0, end.rank)


def _belief_in(record: FailureRecord) -> int:
    if record.secondary:
        return _NAMED_ANOTHER if record.error_fields["error"] == StallError.__name__ else _LOST_PEERS
    return 0 if record.exit_code == 2 else 2


def _signal_hint(number: int) -> str:
    again = "--max-restarts restarts such a job, --resume continues it from its last checkpoint"
    if number == getattr(signal, "SIGKILL", None):
        return f"the system kills processes when memory runs out; {again}"
    return again
