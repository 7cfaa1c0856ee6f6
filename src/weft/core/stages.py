"""How blocks are dealt to pipeline stages: the one rule that planner and engine share.

    cost of a stage = its blocks + what comes before the first of them + what comes after the last (the head)

The deal has the smallest largest stage that contiguous deals can have, each stage with a block at least: a pipeline
is as fast as its slowest stage. An even deal is taken wherever it is as good. Otherwise the stages beside the largest
are as equal as they can be (least sum of squares), and of equal deals the one with more blocks at later stages is
taken, which hold fewer micro-batches. Costs are whole numbers, so that every rank deals alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from weft.core.model_shape import ModelShape


@lru_cache(maxsize=4096)
def deal_shape(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Blocks a stage of a causal LM: weights that multiply every token are the cost, looking a token up costs nothing.

    Of experts those count that a token meets; the head counts whether it is the token table or not.
    """
    by_kind = [kind.linear_flops_per_token // 2 for kind in shape.kinds]
    costs = [by_kind[kind] for kind in shape.order]
    return deal_blocks(costs, after=shape.embedding_parameters, num_stages=num_stages)


def deal_blocks(costs: Sequence[int], *, before: int = 0, after: int = 0, num_stages: int) -> tuple[int, ...]:
    """Blocks a stage, first stage first. `before` is on the first stage, `after` on the last."""
    even = split_blocks(len(costs), num_stages)
    if len(costs) < num_stages:
        return even  # some stage has nothing whatever is done: for others to refuse
    ends = [0, *accumulate(costs)]  # costs of the first so many blocks
    sums = [0, *(before + end for end in ends[1:])]
    sums[-1] += after
    worst = _largest(sums, even)
    least = _least_worst(sums, num_stages, worst=worst)
    return even if least == worst else _most_equal(sums, num_stages, worst=least)


def split_blocks(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks a stage where all cost the same: they differ by one at most.

    The last and the first stage are the first to get the smaller share: 126 blocks on 16 stages give 7 and 7 at the
    ends and 8 between.
    """
    fewer, missing = divmod(num_blocks, num_stages)
    sizes = [fewer + 1] * num_stages if missing else [fewer] * num_stages
    if missing:
        for stage in _shortest_first(num_stages)[: num_stages - missing]:
            sizes[stage] -= 1
    return tuple(sizes)


def _shortest_first(num_stages: int) -> list[int]:
    """Stages in the order in which they are spared a block: last, first, then inwards from the back."""
    return [num_stages - 1, *([0] if num_stages > 1 else []), *range(num_stages - 2, 0, -1)]


def _largest(sums: Sequence[int], sizes: Sequence[int]) -> int:
    cuts = [0, *accumulate(sizes)]
    return max(sums[end] - sums[begin] for begin, end in pairwise(cuts))


def _least_worst(sums: Sequence[int], num_stages: int, *, worst: int) -> int:
    """The smallest largest stage, by bisection; `worst` is known to be possible."""
    low, high = 0, worst
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, num_stages, middle) else (middle + 1, high)
    return high


def _fits(sums: Sequence[int], num_stages: int, worst: int) -> bool:
    """Whether stages that take all they may reach the end. Stages left over could take blocks of others."""
    done = 0
    for _ in range(num_stages):
        done = bisect_right(sums, sums[done] + worst) - 1
    return done == len(sums) - 1


def _most_equal(sums: Sequence[int], num_stages: int, *, worst: int) -> tuple[int, ...]:
    """The deal with the least sum of squares of those whose stages cost at most `worst`."""
    num_blocks = len(sums) - 1
    latest, earliest = [0], [num_blocks]  # where stage k may begin
    for stage in range(1, num_stages + 1):
        reach = bisect_right(sums, sums[latest[-1]] + worst) - 1
        latest.append(min(reach, num_blocks - (num_stages - stage)))
        earliest.append(max(bisect_left(sums, sums[earliest[-1]] - worst), num_stages - stage))
    earliest.reverse()
    following = {num_blocks: (0, num_blocks)}  # where the next stage begins -> (squares from there on, its own next)
    chosen: list[dict[int, tuple[int, int]]] = []
    for stage in range(num_stages - 1, -1, -1):
        found: dict[int, tuple[int, int]] = {}
        for begin in range(earliest[stage], latest[stage] + 1):
            ways = [
                ((sums[end] - sums[begin]) ** 2 + squares, end)
                for end, (squares, _) in following.items()
                if end > begin and sums[end] - sums[begin] <= worst
            ]
            if ways:
                found[begin] = min(ways)
        chosen.append(found)
        following = found
    begin, sizes = 0, []
    for found in reversed(chosen):
        end = found[begin][1]
        sizes.append(end - begin)
        begin = end
    return tuple(sizes)
