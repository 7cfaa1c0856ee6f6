"""PipeDream: 1F1B that never drains; a stage updates its weights after every backward (Harlap et al. 2018, 1806.03377).

A micro-batch's backward must read the weights its forward read, so stage s of p stashes p-s versions, and its gradient
is p-1-s updates old when applied. No bubble but the first fill and the last drain. Changes the mathematics.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.generators.one_f_one_b import alternate
from weft.schedule.schedule import WeightRule
from weft.schedule.size import PipelineSize, ScheduleSpec


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    ahead = size.num_ranks - 1 - rank
    for action in alternate(stage=rank, num_forwards_ahead=ahead, num_microbatches=size.window):
        yield action
        if action.kind is Kind.B:
            yield Action(Kind.U, rank, action.microbatch)


SPEC = ScheduleSpec(name="pipedream", rank_actions=rank_actions, weight_rule=WeightRule.STASH)
