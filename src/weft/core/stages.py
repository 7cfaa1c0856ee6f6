"""Partition of blocks into pipeline stages: the rule that planner and engine share.

    cost of a stage = its blocks + modules before the first block + modules after the last (the head)

The partition is contiguous, each stage has at least one block, and the cost of the largest stage is minimal: a pipeline
is as fast as its slowest stage. An even partition is used if it is as good. Otherwise the other stages are as equal as
possible (least sum of squares), and of equal partitions the one with more blocks at later stages is used, which have
fewer micro-batches in flight. Costs are integers, so that every rank computes the same partition.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from weft.core.model_shape import ModelShape


@lru_cache(maxsize=4096)
def partition_shape(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage of a causal LM. The cost is the weights that multiply every token; an embedding lookup is free.

    Only the experts that a token uses count; the head counts whether it is tied to the embedding or not.
    """
    by_kind = [kind.linear_flops_per_token // 2 for kind in shape.kinds]
    costs = [by_kind[kind] for kind in shape.order]
    return partition_blocks(costs, after=shape.embedding_parameters, num_stages=num_stages)


def partition_blocks(costs: Sequence[int], *, before: int = 0, after: int = 0, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage in order. `before` is a cost of the first stage, `after` of the last."""
    even = even_partition(len(costs), num_stages)
    if len(costs) < num_stages:
        return even  # some stage is empty in any case: the caller refuses it
    ends = [0, *accumulate(costs)]  # cumulative costs
    sums = [0, *(before + end for end in ends[1:])]
    sums[-1] += after
    worst = _largest(sums, even)
    least = _least_worst(sums, num_stages, worst=worst)
    return even if least == worst else _most_equal(sums, num_stages, worst=least)


def even_partition(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks per stage if all blocks cost the same; stages differ by one block at most.

    The last and the first stage get fewer blocks first: 126 blocks on 16 stages give 7 and 7 at the ends and 8 between.
    """
    fewer, missing = divmod(num_blocks, num_stages)
    sizes = [fewer + 1] * num_stages if missing else [fewer] * num_stages
    if missing:
        for stage in _shortest_first(num_stages)[: num_stages - missing]:
            sizes[stage] -= 1
    return tuple(sizes)


def _shortest_first(num_stages: int) -> list[int]:
    """Stages in the order in which they get one block fewer: last, first, then inwards from the back."""
    return [num_stages - 1, *([0] if num_stages > 1 else []), *range(num_stages - 2, 0, -1)]


def _largest(sums: Sequence[int], sizes: Sequence[int]) -> int:
    ends = [0, *accumulate(sizes)]
    return max(sums[end] - sums[begin] for begin, end in pairwise(ends))


def _least_worst(sums: Sequence[int], num_stages: int, *, worst: int) -> int:
    """The smallest possible cost of the largest stage, by bisection; `worst` is known to be possible."""
    low, high = 0, worst
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(sums, num_stages, middle) else (middle + 1, high)
    return high


def _fits(sums: Sequence[int], num_stages: int, worst: int) -> bool:
    """Whether stages of at most `worst` cover all blocks. Empty stages could take blocks of others."""
    done = 0
    for _ in range(num_stages):
        done = bisect_right(sums, sums[done] + worst) - 1
    return done == len(sums) - 1


def _most_equal(sums: Sequence[int], num_stages: int, *, worst: int) -> tuple[int, ...]:
    """The partition with the least sum of squares among those whose stages cost at most `worst`."""
    num_blocks = len(sums) - 1
    latest, earliest = [0], [num_blocks]  # first block of stage k
    for stage in range(1, num_stages + 1):
        reach = bisect_right(sums, sums[latest[-1]] + worst) - 1
        latest.append(min(reach, num_blocks - (num_stages - stage)))
        earliest.append(max(bisect_left(sums, sums[earliest[-1]] - worst), num_stages - stage))
    earliest.reverse()
    following = {
        num_blocks: (0, num_blocks)
    }  # begin of the next stage -> (squares from there on, begin of the stage after it)
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
