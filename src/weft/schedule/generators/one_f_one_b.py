"""1F1B with a flush, or PipeDream-Flush: after p-1-s forwards, stage s alternates one forward, one backward.

(Narayanan et al. 2021, arXiv 2006.09503; DAPPLE, arXiv 2007.01045.) The bubble of GPipe, (p-1)/(m+p-1), but
stage s keeps only min(m, p-s) micro-batches: a backward frees one before the next forward takes one.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, ScheduleSpec


def alternate(*, stage: int, num_forwards_ahead: int, num_microbatches: int) -> Iterator[Action]:
    """Backward i follows forward i + `num_forwards_ahead`, or the last forward."""
    for step in range(num_microbatches + num_forwards_ahead):
        if step < num_microbatches:
            yield Action(Kind.F, stage, step)
        if step >= num_forwards_ahead:
            yield Action(Kind.B, stage, step - num_forwards_ahead)


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    ahead = size.num_ranks - 1 - rank
    return alternate(stage=rank, num_forwards_ahead=ahead, num_microbatches=size.num_microbatches)


SPEC = ScheduleSpec(name="1f1b", rank_actions=rank_actions)
