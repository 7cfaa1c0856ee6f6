"""All-reduce by recursive halving and doubling (Rabenseifner): halves of the rest are exchanged with ranks ever nearer.

Exact for P = 2^k ranks. Of N > P ranks the odd ones below 2 (N - P) first add their tensor to their neighbour's, wait,
and get the sum at the end (the fold).
Sends: 2 S (P - 1) / P, with a fold S more. Steps: 2 log2 P, with a fold 2 more.
Order: by distance, P / 2 first: ((0 + 2) + (1 + 3)) of 4 ranks; folded ranks are added first.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.comm.algorithms.rounds import CollectiveTask, ElementRange, Receive, Round, Send, even_chunks


def rounds(task: CollectiveTask, rank: int) -> Iterator[Round]:
    power = 1 << (task.num_ranks.bit_length() - 1)
    num_folded = task.num_ranks - power
    is_paired = rank < 2 * num_folded
    sits_out = is_paired and rank % 2 == 1
    if num_folded:
        yield _fold(task, rank) if is_paired else ()
    if sits_out:
        yield from ((),) * (2 * (power.bit_length() - 1))
        yield (Receive(rank - 1, task.whole),)
        return
    yield from _exchanges(task, rank // 2 if is_paired else rank - num_folded, power, num_folded)
    if num_folded:
        yield (Send(rank + 1, task.whole),) if is_paired else ()


def _fold(task: CollectiveTask, rank: int) -> Round:
    return (Send(rank - 1, task.whole),) if rank % 2 else (Receive(rank + 1, task.whole, adds=True),)


def _exchanges(task: CollectiveTask, place: int, power: int, num_folded: int) -> Iterator[Round]:
    """Halving, then doubling, among the `power` ranks that take part."""
    steps: list[tuple[int, ElementRange, ElementRange]] = []
    held, distance = task.whole, power // 2
    while distance:
        lower, upper = even_chunks(held, 2)
        kept, given = (upper, lower) if place & distance else (lower, upper)
        peer = _rank_of(place ^ distance, num_folded)
        yield (Send(peer, given), Receive(peer, kept, adds=True))
        steps.append((peer, kept, given))
        held, distance = kept, distance // 2
    for peer, kept, given in reversed(steps):
        yield (Send(peer, kept), Receive(peer, given))


def _rank_of(place: int, num_folded: int) -> int:
    return 2 * place if place < num_folded else place + num_folded
