"""A measured timeline: the mean cost of each stage, and the waits of each rank between its actions.

`asked[r][i]` is when rank r turned to its action i, `starts[r][i]` when the message it needs had arrived. With `made`
the end of the action that made the message, these intervals cover a rank's time:

    busy      start -> end                          idle      asked -> made: there was nothing to receive yet
    receive   max(asked, made) -> start             send      end -> next asked, after an action that sends
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from weft.schedule.actions import Action, Kind
from weft.schedule.schedule import Schedule
from weft.schedule.simulate import StageCosts, simulate
from weft.schedule.timeline import Timeline

Asked = Sequence[Sequence[float]]


class GapKind(StrEnum):
    """The state of a rank that does not compute."""

    IDLE = "idle"
    RECEIVE = "receive"
    SEND = "send"


class Gap(NamedTuple):
    """An interval of a rank between its actions."""

    rank: int
    kind: GapKind
    start_s: float
    end_s: float


def gaps(timeline: Timeline, asked: Asked) -> Iterator[Gap]:
    """All intervals without an action, from the first action of the pipeline to its last end."""
    made = _made(timeline)
    end_s = timeline.origin_s + timeline.makespan_s
    for rank in range(timeline.schedule.num_ranks):
        clock_s, is_sending = timeline.origin_s, False
        for event, turned_s in zip(timeline.events_of(rank), asked[rank], strict=True):
            between = GapKind.SEND if is_sending else GapKind.IDLE
            asked_s = max(turned_s, timeline.origin_s)
            arrived_s = min(max(asked_s, _need_made(timeline.schedule, made, event.action)), event.start_s)
            yield from _gap(rank, between, clock_s, asked_s)
            yield from _gap(rank, GapKind.IDLE, asked_s, arrived_s)
            yield from _gap(rank, GapKind.RECEIVE, arrived_s, event.start_s)
            clock_s, is_sending = event.end_s, _goes_to(timeline.schedule, event.action) not in (None, rank)
        yield from _gap(rank, GapKind.IDLE, clock_s, end_s)


def gap_seconds(timeline: Timeline, asked: Asked) -> list[dict[str, float]]:
    """Seconds by rank and kind of gap."""
    found = [dict.fromkeys(map(str, GapKind), 0.0) for _ in timeline.schedule.ranks]
    for rank, kind, start_s, end_s in gaps(timeline, asked):
        found[rank][str(kind)] += end_s - start_s
    return found


def mean_costs(timeline: Timeline, asked: Asked) -> StageCosts:
    """The costs with which `simulate` repeats the run. A backward that was never split is in `backward_input_s`.

    A transfer between ranks is the mean over the messages that a rank waited for: the arrival of others is not known.
    """
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in timeline.events():
        taken[event.action.kind, event.action.stage].append(event.end_s - event.start_s)
    stages = range(timeline.schedule.num_stages)
    hops = _hops(timeline, asked)
    return StageCosts(
        forward_s=tuple(_mean(taken[Kind.F, stage]) for stage in stages),
        backward_input_s=tuple(_mean(taken[Kind.I, stage] or taken[Kind.B, stage]) for stage in stages),
        backward_weight_s=tuple(_mean(taken[Kind.W, stage]) for stage in stages),
        send_s=tuple(_mean(hops[stage]) for stage in stages[:-1]),
        update_s=tuple(_mean(taken[Kind.U, stage]) for stage in stages),
    )


def replay(timeline: Timeline, costs: StageCosts) -> Timeline:
    """The same order with the measured duration of every action and no other delay than `costs.send_s`.

    Compared with `simulate` it separates uneven actions (a shared core, say) from time that order and actions do not
    explain.
    """
    durations = [
        [end_s - start_s for start_s, end_s in zip(starts, ends, strict=True)]
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]
    return simulate(timeline.schedule, costs, durations=durations)


def _hops(timeline: Timeline, asked: Asked) -> dict[int, list[float]]:
    """Transfer times by boundary (the lower stage): from the end of the action that made the message to its arrival."""
    made, found = _made(timeline), defaultdict(list)
    for event, asked_s in zip(timeline.events(), chain.from_iterable(asked), strict=True):
        source, made_s = _source(timeline.schedule, event.action), _need_made(timeline.schedule, made, event.action)
        if source is not None and asked_s <= made_s < float("inf"):
            found[min(source, event.action.stage)].append(max(0.0, event.start_s - made_s))
    return found


def _made(timeline: Timeline) -> dict[tuple[bool, int, int], float]:
    """(is forward, stage, micro-batch) -> when its activation or input gradient was made."""
    return {
        (event.action.kind is Kind.F, event.action.stage, event.action.microbatch): event.end_s
        for event in timeline.events()
        if event.action.kind in (Kind.F, Kind.B, Kind.I)
    }


def _need_made(schedule: Schedule, made: dict[tuple[bool, int, int], float], action: Action) -> float:
    """When the message that the action needs was made; infinity where it needs none from another rank."""
    source, placement = _source(schedule, action), schedule.stage_to_rank
    if source is None or placement[source] == placement[action.stage]:
        return float("inf")
    return made[action.kind is Kind.F, source, action.microbatch]


def _source(schedule: Schedule, action: Action) -> int | None:
    """The stage whose message the action needs."""
    if action.kind is Kind.F:
        return action.stage - 1 if action.stage > 0 else None
    is_last = action.stage == schedule.num_stages - 1
    return action.stage + 1 if action.kind in (Kind.B, Kind.I) and not is_last else None


def _goes_to(schedule: Schedule, action: Action) -> int | None:
    """The rank that takes the action's message."""
    if action.kind is Kind.F and action.stage < schedule.num_stages - 1:
        return schedule.stage_to_rank[action.stage + 1]
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return schedule.stage_to_rank[action.stage - 1]
    return None


def _gap(rank: int, kind: GapKind, start_s: float, end_s: float) -> Iterator[Gap]:
    if end_s > start_s:
        yield Gap(rank, kind, start_s, end_s)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
