"""Phrases about ranks that wait or do not arrive: who, where, in which state."""

from __future__ import annotations

from collections.abc import Sequence

from weft.comm.flight import GroupTrace
from weft.core.processes import describe_process
from weft.train.ranks.last_stack import read_stack
from weft.train.ranks.status import Observation, RankStatus

RESUME = "--resume continues from the last checkpoint"


def ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"{len(numbers)} ranks from {min(numbers)} to {max(numbers)}"
    *first, last = [str(number) for number in numbers]
    return f"ranks {', '.join(first)} and {last}"


def name(statuses: Sequence[RankStatus]) -> str:
    """ "rank 1 (host a, pid 12)", "ranks 2 and 3 (host b)"."""
    if len(statuses) == 1:
        only = statuses[0]
        return f"rank {only.rank} (host {only.host}, pid {only.pid})"
    hosts = dict.fromkeys(status.host for status in statuses)
    return " and ".join(
        f"{ranks([status.rank for status in statuses if status.host == host])} (host {host})" for host in hosts
    )


def group(trace: GroupTrace) -> str:
    return f" ({trace.title})" if trace.title else f" (of {ranks(trace.ranks)})"


def during(status: RankStatus) -> str:
    return status.phase if status.phase.startswith("after ") else f"in {status.phase}"


def last_wait(status: RankStatus, others: Sequence[int] = ()) -> str:
    """What the rank waits in: a message, or the last collective of a group with one of the other ranks, if given."""
    if status.message:
        return f"the exchange of {status.message} (pipeline) of {status.phase}"
    used = [trace for trace in status.groups.values() if trace.last]
    used = [trace for trace in used if set(others) & set(trace.ranks)] if others else used
    if not used:
        return status.phase
    return f"{used[-1].last[-1].name} {used[-1].number}{group(used[-1])} of {status.phase}"


def observe(status: RankStatus) -> Observation:
    """What this process can see of another one on its host."""
    return Observation(
        rank=status.rank,
        state=describe_process(status.pid, start=status.process_start),
        stack=tuple(read_stack(status.stack_file)),
    )


def hint(status: RankStatus, seen: Observation | None, *, is_own_host: bool) -> str:
    """What to do about a rank that does not answer."""
    if seen is not None and "stopped" in seen.state:
        return f"`kill -CONT {status.pid}` would have continued it; {RESUME}"
    if seen is not None and "ended" in seen.state:
        return f"its own output shows the reason; the system kills processes when memory runs out; {RESUME}"
    if seen is not None and seen.stack:
        return f"its stack, innermost first: {stack(seen.stack)}; {RESUME}"
    if is_own_host or (seen is not None and seen.state):
        return f"it runs code that blocks Python's threads; {RESUME}"
    return f"is host {status.host} up, and the link to it? {RESUME}"


def at(calls: Sequence[str]) -> str:
    """Where the rank stands: its innermost call outside of torch."""
    outside = [call for call in calls if not call.startswith("torch/")]
    return f", at {(outside or calls)[0]}" if calls else ""


def stack(calls: Sequence[str]) -> str:
    return " < ".join(calls)
