"""Naive model parallelism: a micro-batch goes all the way down and back before the next one starts.

The baseline that pipelines are compared with: one micro-batch in flight, one rank busy, bubble (p-1)/p.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, ScheduleSpec


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    for microbatch in range(size.num_microbatches):
        yield Action(Kind.F, rank, microbatch)
        yield Action(Kind.B, rank, microbatch)


SPEC = ScheduleSpec(name="naive", rank_actions=rank_actions)
