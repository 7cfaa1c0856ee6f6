"""Looped breadth-first: v stages per rank, all micro-batches through one stage before the next (arXiv 2211.05953).

Keeps all m micro-batches of all v stages, for few, long phases (a ZeRO-3 stage gathers once per phase). Backwards run
last micro-batch first, as torch's do. Bubble (p-1)/(v*m+p-1) for m >= p; below that each loop waits for p, not m.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, ScheduleSpec


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    stages = range(rank, size.num_stages, size.num_ranks)
    microbatches = range(size.num_microbatches)
    yield from (Action(Kind.F, stage, microbatch) for stage in stages for microbatch in microbatches)
    yield from (Action(Kind.B, stage, microbatch) for stage in stages[::-1] for microbatch in microbatches[::-1])


SPEC = ScheduleSpec(name="looped_bfs", rank_actions=rank_actions, virtual_stages=(1, None))
