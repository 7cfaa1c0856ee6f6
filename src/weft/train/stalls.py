"""Which rank the others waited for, and in which collective: from what the ranks say of themselves to one sentence.

Pure: it asks nobody (`rank_watch` does) but the kernel, for processes of this host. In order of belief:

    a rank that does not answer  >  ranks that issued different collectives  >  the rank that is behind the others

A rank that is behind may itself be waiting, in another group: the one at the end of that chain is to blame.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.comm.flight import GroupTrace
from weft.core.errors import StallError
from weft.core.processes import describe_process
from weft.train.standing import Standing

_RESUME = "--resume continues from the last checkpoint"
# Their shapes are the same on all ranks; those of a gather or a scatter may differ.
_ALIKE = frozenset({"all_reduce", "broadcast"})


@dataclass(frozen=True, kw_only=True)
class StallScene:
    """What one rank found after it had waited in vain. `answered` has the rank itself; `last_seen` those that were
    there once and do not answer."""

    rank: int
    world_size: int
    answered: Mapping[int, Standing]
    last_seen: Mapping[int, Standing]
    timeout_s: float
    is_timeout: bool  # else a connection ended
    is_message: bool = False  # between pipeline stages: not in the groups' traces

    @property
    def own(self) -> Standing:
        return self.answered[self.rank]


def explain(scene: StallScene) -> StallError | None:
    """The rank to blame and the collective; None where all have arrived everywhere."""
    silent = [rank for rank in range(scene.world_size) if rank not in scene.answered]
    if silent:
        return _silent(scene, silent)
    if not scene.is_timeout:
        return None
    return _unlike(scene) or _behind(scene) or _busy(scene)


def explain_lost_store(*, address: str, silent_s: float, rank_0: Standing | None, own: Standing) -> StallError:
    """The rank's own view where nobody can be asked: the store is on rank 0's host, or in rank 0 itself."""
    who = f"rank 0's host ({address})" if rank_0 is None else f"{_name([rank_0])}, on the host of the store {address},"
    state = _state(rank_0, own) if rank_0 is not None else ""
    return StallError(
        f"{who} has not answered for {silent_s:.0f} s{f': {state}' if state else ''};"
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
    states = {_state(standing, scene.own) for standing in known}
    state = states.pop() if len(states) == 1 else ""
    seen = f"last seen {_during(first)} {max(0.0, time.time() - first.time):.0f} s ago"
    failed = f"did not arrive in {_where(scene, silent)} within {scene.timeout_s:g} s" if scene.is_timeout else "left"
    what = f"{failed}: {state or ('it does' if len(known) == 1 else 'they do') + ' not answer'}, {seen}"
    return StallError(f"{_name(known)} {what}", hint=_hint(first, state, scene.own))


def _unlike(scene: StallScene) -> StallError | None:
    """The first collective that is another one on some rank than on most."""
    for key, trace in reversed(scene.own.groups.items()):
        members = [rank for rank in trace.ranks if key in scene.answered[rank].groups]
        for issued in trace.last:
            kinds = {rank: _kind(scene.answered[rank].groups[key], issued.number) for rank in members}
            seen = Counter(kind for kind in kinds.values() if kind)
            if len(seen) > 1:
                usual = seen.most_common(1)[0][0]
                odd = [rank for rank, kind in kinds.items() if kind and kind != usual]
                others = [rank for rank, kind in kinds.items() if kind == usual]
                return StallError(
                    f"the ranks do not issue the same collectives: number {issued.number}{_of(trace)} is"
                    f" {kinds[odd[0]]} on {_ranks(odd)} and {usual} on {_ranks(others)},"
                    f" {_during(scene.answered[odd[0]])}",
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
        # A group used long ago may have left one rank's record and not another's: only then has it no number at all.
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
    """Where traces say nothing, as of messages between stages: whoever is not waiting for others at all."""
    busy = [rank for rank, standing in scene.answered.items() if not standing.is_waiting]
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
    """What the rank itself waited in: the last collective of a group with one of these."""
    phase = scene.own.phase
    if scene.is_message:
        return f"a message between pipeline stages of {phase}"
    shared = [trace for trace in scene.own.groups.values() if set(ranks) & set(trace.ranks) and trace.last]
    if not shared:
        return phase
    return f"{shared[-1].last[-1].name} {shared[-1].number}{_of(shared[-1])} of {phase}"


def _where_is(standing: Standing) -> str:
    used = [trace for trace in standing.groups.values() if trace.last]
    if not used:
        return standing.phase
    return f"{used[-1].last[-1].name} {used[-1].number}{_of(used[-1])} of {standing.phase}"


def _number(standing: Standing, key: str) -> int:
    return standing.groups[key].number if key in standing.groups else 0


def _kind(trace: GroupTrace, number: int) -> str:
    issued = trace.at(number)
    if issued is None:
        return ""
    return f"{issued.name} of {issued.shapes}" if issued.name in _ALIKE else issued.name


def _of(trace: GroupTrace) -> str:
    return f" ({trace.title})" if trace.title else f" (of {_ranks(trace.ranks)})"


def _during(standing: Standing) -> str:
    return standing.phase if standing.phase.startswith("after ") else f"in {standing.phase}"


def _state(standing: Standing, own: Standing) -> str:
    if standing.host != own.host:
        return ""
    return describe_process(standing.pid, start=standing.process_start)


def _hint(standing: Standing, state: str, own: Standing) -> str:
    if "stopped" in state:
        return f"`kill -CONT {standing.pid}` would have let it go on; {_RESUME}"
    if "ended" in state:
        return f"its own output says why; the system kills processes when memory runs out; {_RESUME}"
    if standing.host != own.host:
        return f"is host {standing.host} up, and the link to it? {_RESUME}"
    return f"it runs code that does not let Python's threads run; {_RESUME}"


def _name(standings: Sequence[Standing]) -> str:
    """ "rank 1 (host a, pid 12)", "ranks 2 and 3 (host b)"."""
    if len(standings) == 1:
        only = standings[0]
        return f"rank {only.rank} (host {only.host}, pid {only.pid})"
    hosts = dict.fromkeys(standing.host for standing in standings)
    return " and ".join(
        f"{_ranks([standing.rank for standing in standings if standing.host == host])} (host {host})" for host in hosts
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"{len(ranks)} ranks from {min(ranks)} to {max(ranks)}"
    *first, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(first)} and {last}"
