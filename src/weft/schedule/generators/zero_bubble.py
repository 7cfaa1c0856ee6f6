"""ZB-H1, zero bubble with the memory of 1F1B: 1F1B with a split backward (Qi et al. 2023, arXiv 2401.10241).

Rank r lets its weight backwards lag r input backwards behind, so that they fill the drain: the idle time falls from
(p-1)(F+I+W) to (p-1)(F+I-W). Every rank keeps at most min(m, p) micro-batches until W, as rank 0 of 1F1B does.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.generators.one_f_one_b import alternate
from weft.schedule.size import PipelineSize, ScheduleSpec


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    num_microbatches, lag = size.num_microbatches, min(rank, size.num_microbatches)
    ahead = size.num_ranks - 1 - rank
    for action in alternate(stage=rank, num_forwards_ahead=ahead, num_microbatches=num_microbatches):
        if action.kind is Kind.F:
            yield action
            continue
        yield Action(Kind.I, rank, action.microbatch)
        if action.microbatch >= lag:
            yield Action(Kind.W, rank, action.microbatch - lag)
    for microbatch in range(num_microbatches - lag, num_microbatches):
        yield Action(Kind.W, rank, microbatch)


SPEC = ScheduleSpec(name="zero_bubble", rank_actions=rank_actions)
