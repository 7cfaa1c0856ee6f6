"""GPipe, or F-then-B: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

Every stage keeps all m micro-batches; bubble (p-1)/(m+p-1). Backwards run in the order of the forwards.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, ScheduleSpec


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    for kind in (Kind.F, Kind.B):
        for microbatch in range(size.num_microbatches):
            yield Action(kind, rank, microbatch)


SPEC = ScheduleSpec(name="gpipe", rank_actions=rank_actions)
