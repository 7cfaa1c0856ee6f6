"""The deal of blocks to stages, against every possible one; where the even deal stays; how long it takes."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft import zoo
from weft.core.stages import even_partition, partition_blocks, partition_shape

costs = st.lists(st.integers(0, 6), min_size=1, max_size=9)


def stages_of(sizes: tuple[int, ...], blocks: list[int], before: int, after: int) -> list[int]:
    """What each stage costs."""
    ends = [0, *(sum(sizes[: stage + 1]) for stage in range(len(sizes)))]
    found = [sum(blocks[begin:end]) for begin, end in pairwise(ends)]
    found[0] += before
    found[-1] += after
    return found


@given(blocks=costs, before=st.sampled_from([0, 0, 5]), after=st.sampled_from([0, 3, 9, 30]), data=st.data())
def test_no_deal_has_a_smaller_largest_stage(blocks: list[int], before: int, after: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(blocks)))
    deals = [
        tuple(end - begin for begin, end in pairwise((0, *cuts, len(blocks))))
        for cuts in combinations(range(1, len(blocks)), num_stages - 1)
    ]
    costs_of = {deal: stages_of(deal, blocks, before, after) for deal in deals}
    least = min(map(max, costs_of.values()))
    found = partition_blocks(blocks, before=before, after=after, num_stages=num_stages)
    even = even_partition(len(blocks), num_stages)
    assert max(costs_of[found]) == least
    if max(costs_of[even]) == least:
        assert found == even
    else:  # the others as equal as can be, more blocks later
        best = [deal for deal in deals if max(costs_of[deal]) == least]
        assert found == min(best, key=lambda deal: (sum(cost**2 for cost in costs_of[deal]), deal))


def test_published_models() -> None:
    """A head of 128,256 words is 2.4 blocks of Llama 8B, 4.3 of 1B (tied or not) and two thirds of one of 405B."""
    assert partition_shape(zoo.named("llama-3.1-405b"), 16) == (7, *[8] * 14, 7)
    assert partition_shape(zoo.named("llama-3-8b"), 4) == (8, 9, 9, 6)
    assert partition_shape(zoo.named("llama-3.2-1b"), 4) == (5, 5, 5, 1)


def test_of_experts_those_count_that_a_token_meets() -> None:
    """Mixtral's block holds 1.45e9 weights, of which a token meets 0.4e9: its head of 0.13e9 is a third of that."""
    shape = zoo.named("mixtral-8x7b")
    met = shape.kinds[0].linear_flops_per_token // 2
    assert met < shape.kinds[0].num_parameters / 3
    expected = partition_blocks([met] * 32, after=32_000 * 4096, num_stages=31)
    assert partition_shape(shape, 31) == expected


def test_too_few_blocks_are_for_others_to_refuse() -> None:
    assert partition_blocks([1, 1], num_stages=3) == even_partition(2, 3)


def test_a_search_can_afford_it() -> None:
    """A hard case once, then from the cache: bounds with room for a busy machine."""
    shape = zoo.named("llama-3.1-405b")
    began_s = time.process_time()
    partition_blocks([10**9 + index * 10**6 for index in range(126)], after=20 * 10**9, num_stages=32)
    assert time.process_time() - began_s < 0.5
    partition_shape(shape, 32)
    began_s = time.process_time()
    for _ in range(1000):
        partition_shape(shape, 32)
    assert (time.process_time() - began_s) / 1000 < 5e-4
