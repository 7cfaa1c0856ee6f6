"""ZB-V: two stages per rank placed as a V, split backward (Qi et al. 2023, arXiv 2401.10241, section 6).

With F = I = W no rank waits between its first and its last action, and no rank keeps more than 2p stage inputs (the
memory of 1F1B's rank 0) until W. Needs 2p-1 micro-batches to be full; with fewer, the missing ones are left out.
"""

from __future__ import annotations

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, RankProgram, ScheduleSpec

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741


def rank_actions(size: PipelineSize, rank: int) -> list[Action]:
    num_ranks = size.num_ranks
    num_full = max(size.num_microbatches, 2 * num_ranks - 1)
    down, up = rank, 2 * num_ranks - 1 - rank  # this rank's stages on the two legs of the V
    program = RankProgram()

    def repeat(times: int, *pattern: tuple[Kind, int]) -> None:
        for kind, stage in pattern * times:
            program.add(kind, stage)

    # Fill the V: forwards down until the first micro-batch comes back up, then both legs, then the first backwards.
    repeat(2 * (num_ranks - rank) - 1, (F, down))
    repeat(rank, (F, up), (F, down))
    repeat(num_ranks - rank, (F, up), (I, up), (W, up))
    # Full: one forward and one full backward on each leg; when the micro-batches run out, without forwards down.
    remaining = num_full - program.done[F, down]
    repeat(remaining, (F, down), (I, down), (W, down), (F, up), (I, up), (W, up))
    repeat(num_full - program.done[F, up], (I, down), (W, down), (F, up), (I, up), (W, up))
    # Drain: input backwards first, since other ranks wait for them; weight backwards fill the gaps.
    repeat(rank, (I, down), (I, up))
    repeat(num_ranks - rank, (I, down), (W, down))
    repeat(num_full - program.done[W, up], (W, up))
    repeat(num_full - program.done[W, down], (W, down))
    return [action for action in program.actions if action.microbatch < size.num_microbatches]


SPEC = ScheduleSpec(name="zbv", rank_actions=rank_actions, placement="v", virtual_stages=(2, 2))
