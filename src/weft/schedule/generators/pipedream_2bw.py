"""PipeDream-2BW: 1F1B that never drains, one update per step, two weight buffers (Narayanan 2021, arXiv 2006.09503).

The gradients of a step's m micro-batches are summed; step t reads version max(t-1, 0), hence the constant delay
w(t+1) = w(t) - lr * g(w(t-1)) on every stage. The paper's condition is m >= p. Changes the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.generators.one_f_one_b import alternate
from weft.schedule.schedule import WeightRule
from weft.schedule.size import PipelineSize, ScheduleSpec


def check(size: PipelineSize) -> list[str]:
    if size.num_microbatches >= size.num_ranks:
        return []
    return [
        f"pipedream_2bw needs at least as many micro-batches as ranks, {size.num_ranks}, found {size.num_microbatches}"
    ]


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    ahead = size.num_ranks - 1 - rank
    for action in alternate(stage=rank, num_forwards_ahead=ahead, num_microbatches=size.window):
        yield action
        if action.kind is Kind.B and (action.microbatch + 1) % size.num_microbatches == 0:
            yield Action(Kind.U, rank, action.microbatch)


SPEC = ScheduleSpec(name="pipedream_2bw", rank_actions=rank_actions, weight_rule=WeightRule.DOUBLE_BUFFER, check=check)
