"""Explain a stall in one sentence: the rank that the others waited for, and the collective, from the ranks' statuses.

Pure; `watch` asks the ranks. In order of confidence:

    a rank that has been silent for long  >  ranks that issued different collectives  >  the rank that is behind the
    others, or whose message did not come  >  the only rank that does not wait  >  a rank that is silent now

A rank that is behind may itself be waiting in another group: the last rank of that chain is the cause. Of ranks that
wait for each other it is the one that departed from its order of earlier steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.comm.flight import GroupTrace, Issued
from weft.core.errors import StallError
from weft.train.ranks import stall_words as words
from weft.train.ranks.status import Observation, RankStatus

# Shapes of these are equal on all ranks; shapes of other gathers or scatters may differ.
_ALIKE = frozenset(
    ("all_reduce", "broadcast", "all_gather_base", "reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor")
)
# After an abort these are compared too.
_USUALLY_ALIKE = frozenset(("all_gather", "gather", "scatter", "reduce"))


@dataclass(frozen=True, kw_only=True)
class StallScene:
    """Facts that one rank collected after a wait failed, or lasted too long. `answered` includes the rank itself;
    `last_seen` has ranks that joined once and do not answer, `observed` what processes of their hosts see of them."""

    rank: int
    world_size: int
    answered: Mapping[int, RankStatus]
    last_seen: Mapping[int, RankStatus]
    timeout_s: float
    is_timeout: bool  # otherwise a connection ended
    is_abort: bool = False  # of this rank in C++: so some collective has unequal shapes, or lasted too long
    observed: Mapping[int, Observation] = field(default_factory=dict)

    @property
    def own(self) -> RankStatus:
        return self.answered[self.rank]


class _Late(NamedTuple):
    """`rank` has not arrived where `waiting` waits: in the group `key`, or with a message ("")."""

    key: str
    rank: int
    waiting: int


def explain(scene: StallScene) -> StallError | None:
    """The error that names the late rank and the collective; None if all ranks have arrived everywhere."""
    silent = [rank for rank in range(scene.world_size) if rank not in scene.answered]
    if not scene.is_timeout:
        return _silent(scene, silent) if silent else None
    lost = [rank for rank in silent if _is_lost(scene, rank)]
    if lost:
        return _silent(scene, lost)
    return _unlike(scene) or _behind(scene) or _busy(scene) or (_silent(scene, silent) if silent else None)


def is_patient(scene: StallScene) -> bool:
    """Whether some rank does work that may take minutes: then a long wait is no hang. The last beat of a silent rank
    says nothing about it: it may have left that phase since."""
    return any(status.is_slow_phase for status in scene.answered.values())


def explain_lost_store(*, address: str, silent_s: float, rank_0: RankStatus | None, own: RankStatus) -> StallError:
    """The error if no rank can be asked, since the store is lost: it is on rank 0's host, or in rank 0 itself."""
    lost = "rank 0's host" if rank_0 is None else f"{words.name([rank_0])}, on the host of the store"
    where = f"{lost} ({address})" if rank_0 is None else f"{lost} {address},"
    state = words.observe(rank_0).state if rank_0 is not None and rank_0.host == own.host else ""
    return StallError(
        f"{where} has not answered for {silent_s:.0f} s{f': {state}' if state else ''};"
        f" rank {own.rank} (host {own.host}) ended {words.during(own)}",
        hint=f"is that host up, and the link to it? {words.RESUME}",
    )


# ------------------------------------------------------------------------------------------------------- silent ranks


def _is_lost(scene: StallScene, rank: int) -> bool:
    """Whether a silent rank has been silent for a good part of the wait; another may only be busy for some seconds."""
    seen = scene.last_seen.get(rank)
    return seen is None or scene.own.time - seen.time > min(scene.timeout_s / 2, 30.0)


def _silent(scene: StallScene, silent: Sequence[int]) -> StallError:
    absent = [rank for rank in silent if rank not in scene.last_seen]
    if absent:
        return StallError(
            f"{words.ranks(absent)} never joined within {scene.timeout_s:g} s",
            hint="were all ranks started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE? can they reach it?",
        )
    known = [scene.last_seen[rank] for rank in silent]
    first, observed = known[0], scene.observed.get(silent[0])
    states = {scene.observed[rank].state if rank in scene.observed else "" for rank in silent}
    state = states.pop() if len(states) == 1 else ""
    seen = f"last seen {words.during(first)} {max(0.0, time.time() - first.time):.0f} s ago"
    where = words.last_wait(scene.own, silent)
    failed = f"did not arrive in {where} within {scene.timeout_s:g} s" if scene.is_timeout else "left"
    at = words.at(observed.stack) if observed is not None else ""
    what = f"{failed}: {state or ('it does' if len(known) == 1 else 'they do') + ' not answer'}, {seen}{at}"
    hint = words.hint(first, observed, is_own_host=first.host == scene.own.host)
    return StallError(f"{words.name(known)} {what}", hint=hint)


# ----------------------------------------------------------------------------------------------- unlike collectives


def _unlike(scene: StallScene) -> StallError | None:
    """The error of the first collective that differs between ranks."""
    for key, trace in reversed(scene.own.groups.items()):
        members = [rank for rank in trace.ranks if rank in scene.answered and key in scene.answered[rank].groups]
        for issued in trace.last:
            found = {rank: scene.answered[rank].groups[key].at(issued.number) for rank in members}
            kinds = {rank: _kind(one, scene) for rank, one in found.items() if one is not None}
            if len(set(kinds.values())) > 1:
                return _unlike_error(scene, trace, found, kinds)
    return None


def _unlike_error(
    scene: StallScene, trace: GroupTrace, found: Mapping[int, Issued | None], kinds: Mapping[int, str]
) -> StallError:
    number = next(one.number for one in found.values() if one is not None)
    unusual = [rank for rank in kinds if (one := found[rank]) is not None and one.is_usual is False]
    most, count = Counter(kinds.values()).most_common(1)[0]
    odd = [rank for rank in kinds if kinds[rank] != most]
    is_known = count > len(kinds) / 2
    if not is_known and 0 < len(unusual) < len(kinds):
        odd, is_known = unusual, True
    said = " and ".join(
        f"{kind} on {words.ranks([rank for rank in kinds if kinds[rank] == kind])}"
        for kind in sorted({*kinds.values()}, key=lambda kind: kinds[odd[0]] != kind)
    )
    late = scene.answered[odd[0]]
    who = words.name([scene.answered[rank] for rank in odd])
    verb = "issues another collective" if len(odd) == 1 else "issue other collectives"
    blame = f"{who} {verb} than the others" if is_known else "the ranks do not issue the same collectives"
    return StallError(
        f"{blame}: number {number}{words.group(trace)} is {said}, {words.during(late)}{words.at(late.stack)}",
        hint="every rank of a group must issue the same collectives, with the same shapes, in the same order;"
        f" the stack of rank {late.rank}, innermost first: {words.stack(late.stack)}",
    )


def _kind(issued: Issued, scene: StallScene) -> str:
    """With the shape where it must be equal; after an abort also where it may not be, but for exchanges."""
    is_alike = issued.name in _ALIKE or (scene.is_abort and issued.name in _USUALLY_ALIKE)
    return f"{issued.name} of {issued.shapes}" if is_alike else issued.name


# ------------------------------------------------------------------------------------------- ranks behind the others


def _behind(scene: StallScene) -> StallError | None:
    passed, late = [scene.rank], _late(scene, scene.rank)
    found = late
    while late is not None:
        found = late
        if late.rank in passed:
            return _circle(scene, passed)
        passed.append(late.rank)
        late = _late(scene, late.rank) if late.rank in scene.answered else None
    if found is None or found.rank not in scene.answered:
        return None
    waiting = scene.answered[found.waiting]
    if not found.key:
        return _late_error(scene, found.rank, words.last_wait(waiting))
    number = _number(scene.answered[found.rank], found.key) + 1
    issued = waiting.groups[found.key].at(number)
    what = f"{issued.name} {number}" if issued else f"collective {number}"
    return _late_error(scene, found.rank, f"{what}{words.group(waiting.groups[found.key])} of {waiting.phase}")


def _late(scene: StallScene, rank: int) -> _Late | None:
    """The rank that this one waits for: of its message, or furthest behind it in a group."""
    status = scene.answered[rank]
    if status.message:
        return _Late("", status.message_peer, rank)
    for key, trace in reversed(status.groups.items()):
        numbers = {other: _number(scene.answered[other], key) for other in trace.ranks if other in scene.answered}
        # An old group may have dropped out of one rank's record but not another's: only then it has number 0.
        if not trace.last or (0 in numbers.values() and trace.last[0].number > 1):
            continue
        slowest = min(numbers, key=lambda other: numbers[other], default=rank)
        if slowest != rank and numbers[slowest] < trace.number:
            return _Late(key, slowest, rank)
    return None


def _circle(scene: StallScene, passed: Sequence[int]) -> StallError:
    waits = ", ".join(f"rank {rank} is in {words.last_wait(scene.answered[rank])}" for rank in passed)
    departed = [rank for rank in passed if _has_departed(scene.answered[rank])]
    blame = f"{words.ranks(passed)} wait for each other"
    if len(departed) == 1:
        blame = f"{words.name([scene.answered[departed[0]]])} left its order of collectives, and {blame}"
    return StallError(
        f"{blame}: {waits}", hint="some rank skipped a collective, or the ranks issue them in another order"
    )


def _has_departed(status: RankStatus) -> bool:
    return any(issued.is_usual is False for trace in status.groups.values() for issued in trace.last[-4:])


def _busy(scene: StallScene) -> StallError | None:
    """The error without group traces: the only rank that is not waiting."""
    busy = [rank for rank, status in scene.answered.items() if not status.is_waiting]
    if len(busy) != 1 or busy == [scene.rank]:
        return None
    return _late_error(scene, busy[0], words.last_wait(scene.own, busy))


def _late_error(scene: StallScene, rank: int, where: str) -> StallError:
    late = scene.answered[rank]
    state = words.observe(late).state if late.host == scene.own.host else ""
    since_s = max(0.0, late.time - late.phase_since)
    return StallError(
        f"{words.name([late])} did not arrive in {where} within {scene.timeout_s:g} s:"
        f" {f'{state}, ' if state else ''}{words.during(late)} for {since_s:.0f} s{words.at(late.stack)}",
        hint=f"its stack, innermost first: {words.stack(late.stack)};"
        " train.hang_timeout_s and train.collective_timeout_s allow longer waits",
    )


def _number(status: RankStatus, key: str) -> int:
    return status.groups[key].number if key in status.groups else 0
