"""Micro-batches in flight per stage and per rank. They follow from the order only; costs do not matter.

A stage holds a micro-batch's activations from its F until its B; where the backward is split, part of them until I,
part until W, so both are counted. Peak of a rank = max over time of the sum over its stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.schedule.actions import Kind
from weft.schedule.schedule import Schedule

UNTIL_INPUT = frozenset({Kind.B, Kind.I})
UNTIL_WEIGHT = frozenset({Kind.B, Kind.W})


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Peaks. The peak of a rank is at most the sum of its stages' peaks, which need not coincide."""

    by_stage_until_input: tuple[int, ...]
    by_stage_until_weight: tuple[int, ...]
    by_rank_until_input: tuple[int, ...]
    by_rank_until_weight: tuple[int, ...]


def count_in_flight(schedule: Schedule) -> InFlight:
    stages_input, ranks_input = _peaks(schedule, freed_by=UNTIL_INPUT)
    stages_weight, ranks_weight = _peaks(schedule, freed_by=UNTIL_WEIGHT)
    return InFlight(
        by_stage_until_input=stages_input,
        by_stage_until_weight=stages_weight,
        by_rank_until_input=ranks_input,
        by_rank_until_weight=ranks_weight,
    )


def _peaks(schedule: Schedule, *, freed_by: frozenset[Kind]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(peaks by stage, peaks by rank)"""
    by_stage, by_rank = [0] * schedule.num_stages, [0] * schedule.num_ranks
    held_by_stage = [0] * schedule.num_stages
    for rank, actions in enumerate(schedule.ranks):
        held = 0
        for kind, stage, _ in actions:
            change = 1 if kind is Kind.F else -1 if kind in freed_by else 0
            held += change
            held_by_stage[stage] += change
            by_rank[rank] = max(by_rank[rank], held)
            by_stage[stage] = max(by_stage[stage], held_by_stage[stage])
    return tuple(by_stage), tuple(by_rank)
