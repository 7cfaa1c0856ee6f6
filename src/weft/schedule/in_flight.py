"""How many micro-batches a stage or a rank holds at once. Follows from the order alone: costs do not change it.

A stage holds a micro-batch's activations from its F until its B; where the backward is cut, part of them until I, part
until W, so both counts are kept. peak of a rank = max over time of the sum over its stages of (size x held).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.schedule.actions import Kind
from weft.schedule.schedule import Schedule

UNTIL_INPUT = frozenset({Kind.B, Kind.I})
UNTIL_WEIGHT = frozenset({Kind.B, Kind.W})


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Peaks. The peak of a rank is at most the sum of its stages' peaks: they need not come at the same time."""

    by_stage_until_input: tuple[int, ...]
    by_stage_until_weight: tuple[int, ...]
    by_rank_until_input: tuple[int, ...]
    by_rank_until_weight: tuple[int, ...]


def count_in_flight(schedule: Schedule) -> InFlight:
    ones = (1,) * schedule.num_stages
    stages_input, ranks_input = _peaks(schedule, ones, freed_by=UNTIL_INPUT)
    stages_weight, ranks_weight = _peaks(schedule, ones, freed_by=UNTIL_WEIGHT)
    return InFlight(
        by_stage_until_input=stages_input,
        by_stage_until_weight=stages_weight,
        by_rank_until_input=ranks_input,
        by_rank_until_weight=ranks_weight,
    )


def peak_by_rank(schedule: Schedule, sizes: Sequence[int], *, until_weight: bool = True) -> tuple[int, ...]:
    """The peak of each rank where a micro-batch takes `sizes[s]` (bytes, say) on stage s."""
    return _peaks(schedule, sizes, freed_by=UNTIL_WEIGHT if until_weight else UNTIL_INPUT)[1]


def _peaks(
    schedule: Schedule, sizes: Sequence[int], *, freed_by: frozenset[Kind]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(by stage, by rank)"""
    by_stage, by_rank = [0] * schedule.num_stages, [0] * schedule.num_ranks
    held_by_stage = [0] * schedule.num_stages
    for rank, actions in enumerate(schedule.ranks):
        held = 0
        for kind, stage, _ in actions:
            if kind is Kind.F:
                held += sizes[stage]
                held_by_stage[stage] += sizes[stage]
                by_rank[rank] = max(by_rank[rank], held)
                by_stage[stage] = max(by_stage[stage], held_by_stage[stage])
            elif kind in freed_by:
                held -= sizes[stage]
                held_by_stage[stage] -= sizes[stage]
    return tuple(by_stage), tuple(by_rank)
