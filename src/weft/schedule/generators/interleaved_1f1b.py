"""Interleaved 1F1B: v stages a rank, visited in rounds of about p micro-batches, depth first.

(Narayanan et al. 2021, arXiv 2104.04473.) Rank r runs 2(p-1-r) + (v-1)g forwards ahead, g the micro-batches of a round;
bubble (p-1)/(v*m+p-1) where p divides m. Rounds need not be of p: g = m / max(1, m // p) as torch allows, if whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Action, Kind
from weft.schedule.request import Request, ScheduleSpec


def num_rounds(request: Request) -> int:
    return max(1, request.num_microbatches // request.num_ranks)


def check(request: Request) -> list[str]:
    rounds = num_rounds(request)
    if request.num_microbatches % rounds == 0:
        return []
    return [
        f"interleaved_1f1b runs {request.num_microbatches} micro-batches over {request.num_ranks} ranks in {rounds} "
        f"rounds, and {rounds} does not divide {request.num_microbatches}"
    ]


def rank_actions(request: Request, rank: int) -> Iterator[Action]:
    num_ranks, chunks = request.num_ranks, request.virtual_stages
    per_round = request.num_microbatches // num_rounds(request)
    num_slots = request.num_microbatches * chunks
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
