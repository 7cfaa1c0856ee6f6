"""Explain a stall in one sentence: the rank that the others waited for, and the collective, from the ranks' statuses.

Pure, except that it asks the kernel about processes of this host; `watch` asks the ranks. In order of confidence:

    a rank that does not answer  >  ranks that issued different collectives  >  the rank that is behind the others

A rank that is behind may itself be waiting in another group: the last rank of that chain is the cause.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.comm.flight import GroupTrace
from weft.core.errors import StallError
from weft.core.processes import describe_process
from weft.train.ranks.status import RankStatus

_RESUME = "--resume continues from the last checkpoint"
# Shapes of these are equal on all ranks; shapes of a gather or scatter may differ.
_ALIKE = frozenset({"all_reduce", "broadcast"})


@dataclass(frozen=True, kw_only=True)
class StallScene:
    """Facts that one rank collected after a wait failed. `answered` includes the rank itself; `last_seen` has ranks
    that joined once and do not answer."""

    rank: int
    world_size: int
    answered: Mapping[int, RankStatus]
    last_seen: Mapping[int, RankStatus]
    timeout_s: float
    is_timeout: bool  # otherwise a connection ended
    is_message: bool = False  # a p2p message between pipeline stages, which group traces do not include

    @property
    def own(self) -> RankStatus:
        return self.answered[self.rank]


def explain(scene: StallScene) -> StallError | None:
    """The error that names the late rank and the collective; None if all ranks have arrived everywhere."""
    silent = [rank for rank in range(scene.world_size) if rank not in scene.answered]
    if silent:
        return _silent(scene, silent)
    if not scene.is_timeout:
        return None
    return _unlike(scene) or _behind(scene) or _busy(scene)


def explain_lost_store(*, address: str, silent_s: float, rank_0: RankStatus | None, own: RankStatus) -> StallError:
    """The error if no rank can be asked, since the store is lost: it is on rank 0's host, or in rank 0 itself."""
    name = f"rank 0's host ({address})" if rank_0 is None else f"{_name([rank_0])}, on the host of the store {address},"
    state = _state(rank_0, own) if rank_0 is not None else ""
    return StallError(
        f"{name} has not answered for {silent_s:.0f} s{f': {state}' if state else ''};"
        f" rank {own.rank} (host {own.host}) ended {_during(own)}",
        hint=f"is that host up, and the link to it? {_RESUME}",
    )


def _silent(scene: StallScene, silent: Sequence[int]) -> StallError:
    absent = [rank for rank in silent if rank not in scene.last_seen]
    if absent:
        return StallError(
            f"{_ranks(absent)} never joined within {scene.timeout_s:g} s",
            hint="were all ranks started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE? can they reach it?",
        )
    known = [scene.last_seen[rank] for rank in silent]
    first = known[0]
    states = {_state(status, scene.own) for status in known}
    state = states.pop() if len(states) == 1 else ""
    seen = f"last seen {_during(first)} {max(0.0, time.time() - first.time):.0f} s ago"
    failed = f"did not arrive in {_where(scene, silent)} within {scene.timeout_s:g} s" if scene.is_timeout else "left"
    what = f"{failed}: {state or ('it does' if len(known) == 1 else 'they do') + ' not answer'}, {seen}"
    return StallError(f"{_name(known)} {what}", hint=_hint(first, state, scene.own))


def _unlike(scene: StallScene) -> StallError | None:
    """The error of the first collective that differs between ranks."""
    for key, trace in reversed(scene.own.groups.items()):
        members = [rank for rank in trace.ranks if key in scene.answered[rank].groups]
        for issued in trace.last:
            kinds = {rank: _kind(scene.answered[rank].groups[key], issued.number) for rank in members}
            seen = Counter(kind for kind in kinds.values() if kind)
            if len(seen) > 1:
                usual = seen.most_common(1)[0][0]
                differing = [rank for rank, kind in kinds.items() if kind and kind != usual]
                others = [rank for rank, kind in kinds.items() if kind == usual]
                return StallError(
                    f"the ranks do not issue the same collectives: number {issued.number}{_of(trace)} is"
                    f" {kinds[differing[0]]} on {_ranks(differing)} and {usual} on {_ranks(others)},"
                    f" {_during(scene.answered[differing[0]])}",
                    hint="every rank of a group must issue the same collectives in the same order",
                )
    return None


def _behind(scene: StallScene) -> StallError | None:
    passed, rank, late = [scene.rank], scene.rank, _late(scene, scene.rank)
    found = late
    while late is not None:
        found, rank = late, late[1]
        if rank in passed:
            return _circle(scene, passed)
        passed.append(rank)
        late = _late(scene, rank)
    if found is None:
        return None
    key, _, waiting = found
    number = _number(scene.answered[rank], key) + 1
    issued = scene.answered[waiting].groups[key].at(number)
    name = f"{issued.name} {number}" if issued else f"collective {number}"
    return _late_error(scene, rank, f"{name}{_of(scene.answered[waiting].groups[key])} of {scene.own.phase}")


def _late(scene: StallScene, rank: int) -> tuple[str, int, int] | None:
    """The group in which another rank is furthest behind this one: (group, that rank, this rank)."""
    for key, trace in reversed(scene.answered[rank].groups.items()):
        numbers = {other: _number(scene.answered[other], key) for other in trace.ranks if other in scene.answered}
        # An old group may have dropped out of one rank's record but not another's: only then it has number 0.
        if not trace.last or (0 in numbers.values() and trace.last[0].number > 1):
            continue
        slowest = min(numbers, key=lambda other: numbers[other], default=rank)
        if slowest != rank and numbers[slowest] < trace.number:
            return key, slowest, rank
    return None


def _circle(scene: StallScene, passed: Sequence[int]) -> StallError:
    waits = [f"rank {rank} is in {_where_is(scene.answered[rank])}" for rank in passed]
    return StallError(
        f"{_ranks(passed)} wait for each other: {', '.join(waits)}",
        hint="some rank skipped a collective, or the ranks issue them in another order",
    )


def _busy(scene: StallScene) -> StallError | None:
    """The error without group traces (p2p messages between stages): the only rank that is not waiting."""
    busy = [rank for rank, status in scene.answered.items() if not status.is_waiting]
    if len(busy) != 1 or busy == [scene.rank]:
        return None
    return _late_error(scene, busy[0], _where(scene, busy))


def _late_error(scene: StallScene, rank: int, where: str) -> StallError:
    late = scene.answered[rank]
    state = _state(late, scene.own)
    since_s = max(0.0, late.time - late.phase_since)
    at = f", at {late.stack[0]}" if late.stack else ""
    return StallError(
        f"{_name([late])} did not arrive in {where} within {scene.timeout_s:g} s:"
        f" {f'{state}, ' if state else ''}{_during(late)} for {since_s:.0f} s{at}",
        hint=f"its stack, innermost first: {' < '.join(late.stack)}; train.collective_timeout_s allows longer waits",
    )


def _where(scene: StallScene, ranks: Sequence[int]) -> str:
    """The wait of the rank itself: the last collective of a group with one of these ranks."""
    phase = scene.own.phase
    if scene.is_message:
        return f"a message between pipeline stages of {phase}"
    shared = [trace for trace in scene.own.groups.values() if set(ranks) & set(trace.ranks) and trace.last]
    if not shared:
        return phase
    return f"{shared[-1].last[-1].name} {shared[-1].number}{_of(shared[-1])} of {phase}"


def _where_is(status: RankStatus) -> str:
    used = [trace for trace in status.groups.values() if trace.last]
    if not used:
        return status.phase
    return f"{used[-1].last[-1].name} {used[-1].number}{_of(used[-1])} of {status.phase}"


def _number(status: RankStatus, key: str) -> int:
    return status.groups[key].number if key in status.groups else 0


def _kind(trace: GroupTrace, number: int) -> str:
    issued = trace.at(number)
    if issued is None:
        return ""
    return f"{issued.name} of {issued.shapes}" if issued.name in _ALIKE else issued.name


def _of(trace: GroupTrace) -> str:
    return f" ({trace.title})" if trace.title else f" (of {_ranks(trace.ranks)})"


def _during(status: RankStatus) -> str:
    return status.phase if status.phase.startswith("after ") else f"in {status.phase}"


def _state(status: RankStatus, own: RankStatus) -> str:
    if status.host != own.host:
        return ""
    return describe_process(status.pid, start=status.process_start)


def _hint(status: RankStatus, state: str, own: RankStatus) -> str:
    if "stopped" in state:
        return f"`kill -CONT {status.pid}` would have continued it; {_RESUME}"
    if "ended" in state:
        return f"its own output shows the reason; the system kills processes when memory runs out; {_RESUME}"
    if status.host != own.host:
        return f"is host {status.host} up, and the link to it? {_RESUME}"
    return f"it runs code that blocks Python's threads; {_RESUME}"


def _name(statuses: Sequence[RankStatus]) -> str:
    """ "rank 1 (host a, pid 12)", "ranks 2 and 3 (host b)"."""
    if len(statuses) == 1:
        only = statuses[0]
        return f"rank {only.rank} (host {only.host}, pid {only.pid})"
    hosts = dict.fromkeys(status.host for status in statuses)
    return " and ".join(
        f"{_ranks([status.rank for status in statuses if status.host == host])} (host {host})" for host in hosts
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    *first, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(first)} and {last}"
