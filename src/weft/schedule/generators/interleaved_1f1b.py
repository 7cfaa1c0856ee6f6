"""Interleaved 1F1B: v stages per rank, visited in rounds of about p micro-batches, depth first.

(Narayanan et al. 2021, arXiv 2104.04473.) Rank r runs 2(p-1-r) + (v-1)g forwards ahead, g the micro-batches of a round;
bubble (p-1)/(v*m+p-1) where p divides m. A round need not have p: g = m / max(1, m // p), an integer, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.size import PipelineSize, ScheduleSpec


def num_rounds(size: PipelineSize) -> int:
    return max(1, size.num_microbatches // size.num_ranks)


def check(size: PipelineSize) -> list[str]:
    rounds = num_rounds(size)
    if size.num_microbatches % rounds == 0:
        return []
    return [
        f"interleaved_1f1b runs {size.num_microbatches} micro-batches over {size.num_ranks} ranks in {rounds} "
        f"rounds, and {rounds} does not divide {size.num_microbatches}"
    ]


def rank_actions(size: PipelineSize, rank: int) -> Iterator[Action]:
    num_ranks, chunks = size.num_ranks, size.virtual_stages
    per_round = size.num_microbatches // num_rounds(size)
    num_slots = size.num_microbatches * chunks
    ahead = min(num_slots, 2 * (num_ranks - 1 - rank) + (chunks - 1) * per_round)

    def place(slot: int) -> tuple[int, int]:
        """(chunk, micro-batch) of the slot-th forward: a round passes every chunk before the next round starts."""
        visit, within = divmod(slot, per_round)
        return visit % chunks, visit // chunks * per_round + within

    for step in range(num_slots + ahead):
        if step < num_slots:
            chunk, microbatch = place(step)
            yield Action(Kind.F, chunk * num_ranks + rank, microbatch)
        if step >= ahead:
            chunk, microbatch = place(step - ahead)
            yield Action(Kind.B, (chunks - 1 - chunk) * num_ranks + rank, microbatch)


SPEC = ScheduleSpec(name="interleaved_1f1b", rank_actions=rank_actions, virtual_stages=(1, None), check=check)
