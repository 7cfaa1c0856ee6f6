"""PipeDream-2BW: 1F1B that never drains, one update a step, two weight buffers (Narayanan 2021, arXiv 2006.09503).

The gradients of a step's m micro-batches are added up; step t reads version max(t-1, 0), hence the constant delay
w(t+1) = w(t) - lr * g(w(t-1)) on every stage. The paper's condition is m >= p. Changes the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.generators.one_f_one_b import alternate
from weft.schedule.request import Request, ScheduleSpec
from weft.schedule.schedule import WeightRule


def check(request: Request) -> list[str]:
    if request.num_microbatches >= request.num_ranks:
        return []
    return [
        f"pipedream_2bw needs at least as many micro-batches as ranks, {request.num_ranks}, "
        f"and was given {request.num_microbatches}"
    ]


def rank_actions(request: Request, rank: int) -> Iterator[Action]:
    ahead = request.num_ranks - 1 - rank
    for action in alternate(stage=rank, num_forwards_ahead=ahead, num_microbatches=request.window):
        yield action
        if action.kind is Kind.B and (action.microbatch + 1) % request.num_microbatches == 0:
            yield Action(Kind.U, rank, action.microbatch)


SPEC = ScheduleSpec(name="pipedream_2bw", rank_actions=rank_actions, weight_rule=WeightRule.DOUBLE_BUFFER, check=check)
