"""`simulate`: start and end of each action of a schedule, given the costs of each stage. A measured run fills the same
`Timeline`.

An action starts when its rank is free and its input has arrived: for F(s) the output of F(s-1), for B(s) or I(s) the
gradient of B(s+1) or I(s+1), each sent in `send_s`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.errors import PlanError
from weft.schedule.actions import Kind
from weft.schedule.schedule import Schedule
from weft.schedule.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Seconds (or any one unit) per micro-batch on each stage. Recompute belongs to `backward_input_s`.

    `send_s[s]` is the transfer between stages s and s+1: 0 where both are on one rank; it keeps no rank busy.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    update_s: tuple[float, ...]

    @staticmethod
    def uniform(
        num_stages: int,
        *,
        forward_s: float = 1,
        backward_input_s: float = 1,
        backward_weight_s: float = 1,
        send_s: float = 0,
        update_s: float = 0,
    ) -> StageCosts:
        return StageCosts(
            forward_s=(forward_s,) * num_stages,
            backward_input_s=(backward_input_s,) * num_stages,
            backward_weight_s=(backward_weight_s,) * num_stages,
            send_s=(send_s,) * (num_stages - 1),
            update_s=(update_s,) * num_stages,
        )


class Dependency(NamedTuple):
    """Input, cost and result of a (kind, stage), as places on a micro-batch's path: see `_dependencies`."""

    needs: int | None
    hop_s: float
    duration_s: float
    makes: int | None


@dataclass
class Simulation:
    """Finished or deadlocked: `ends[r]` has the actions that rank r completed, `blocked` why it stopped."""

    starts: list[list[float]]
    ends: list[list[float]]
    blocked: dict[int, str]


def run(schedule: Schedule, costs: StageCosts, durations: Sequence[Sequence[float]] | None = None) -> Simulation:
    """Run every rank as far as it can; a result wakes the one rank that waits for it. Linear in the actions.

    `durations[r][i]` replaces the cost of action i of rank r.
    """
    dependencies, window = _dependencies(schedule, costs), schedule.window
    starts: list[list[float]] = [[] for _ in schedule.ranks]
    ends: list[list[float]] = [[] for _ in schedule.ranks]
    done: list[float | None] = [None] * (2 * schedule.num_stages * window)
    waiting: dict[int, int] = {}
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        own_starts, own_ends = starts[rank], ends[rank]
        clock = own_ends[-1] if own_ends else 0.0
        actions = schedule.ranks[rank]
        for position in range(len(own_ends), len(actions)):  # a slice would copy the rest at every wake-up
            kind, stage, microbatch = actions[position]
            needs, hop_s, duration_s, makes = dependencies[kind][stage]
            if needs is not None:
                made_at = done[needs * window + microbatch]
                if made_at is None:
                    waiting[needs * window + microbatch] = rank
                    break
                clock = max(clock, made_at + hop_s)
            own_starts.append(clock)
            clock += duration_s if durations is None else durations[rank][position]
            own_ends.append(clock)
            if makes is not None:
                cell = makes * window + microbatch
                done[cell] = clock
                if cell in waiting:
                    ready.append(waiting.pop(cell))
    blocked = {rank: _explain(schedule, rank, len(ends[rank]), cell) for cell, rank in waiting.items()}
    return Simulation(starts, ends, blocked)


def _dependencies(schedule: Schedule, costs: StageCosts) -> dict[Kind, list[Dependency]]:
    """A micro-batch's path has 2S places: F of stage s at s, its B or I at 2S-1-s. Each needs the place before."""
    num_stages, placement = schedule.num_stages, schedule.stage_to_rank
    found: dict[Kind, list[Dependency]] = {kind: [] for kind in Kind}
    for stage in range(num_stages):
        back = 2 * num_stages - 1 - stage
        hops = [
            costs.send_s[min(stage, other)] if placement[stage] != placement[other] else 0.0
            for other in (max(stage - 1, 0), min(stage + 1, num_stages - 1))
        ]
        full_s = costs.backward_input_s[stage] + costs.backward_weight_s[stage]
        found[Kind.F].append(Dependency(stage - 1 if stage else None, hops[0], costs.forward_s[stage], stage))
        found[Kind.B].append(Dependency(back - 1, hops[1], full_s, back))
        found[Kind.I].append(Dependency(back - 1, hops[1], costs.backward_input_s[stage], back))
        found[Kind.W].append(Dependency(back, 0.0, costs.backward_weight_s[stage], None))
        found[Kind.U].append(Dependency(None, 0.0, costs.update_s[stage], None))
    return found


def _explain(schedule: Schedule, rank: int, position: int, cell: int) -> str:
    place, microbatch = divmod(cell, schedule.window)
    back = 2 * schedule.num_stages - 1 - place
    result = f"F of stage {place}" if place < schedule.num_stages else f"the input gradient of stage {back}"
    return f"rank {rank} is blocked at {schedule.ranks[rank][position]}, waiting for {result}, micro-batch {microbatch}"


def simulate(
    schedule: Schedule, costs: StageCosts | None = None, *, durations: Sequence[Sequence[float]] | None = None
) -> Timeline:
    """Start and end of every action; costs are F = I = W = 1 on every stage unless given. `durations`: see `run`."""
    outcome = run(schedule, costs or StageCosts.uniform(schedule.num_stages), durations)
    for sentence in outcome.blocked.values():
        raise PlanError(f"the schedule {schedule.name} deadlocks: {sentence}", hint="check_schedule lists every reason")
    return Timeline(schedule=schedule, starts=tuple(map(tuple, outcome.starts)), ends=tuple(map(tuple, outcome.ends)))
