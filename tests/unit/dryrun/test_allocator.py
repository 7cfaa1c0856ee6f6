"""The caching allocator's rules, each by a trace worked out by hand; then what holds for every trace."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.dryrun.allocator import AllocatorEvent, Reserved, least_capacity, segment_bytes, simulate

MIB = 2**20
KIB = 2**10
GRANULE = 20 * MIB


def classic(*events: AllocatorEvent, capacity_bytes: int | None = None) -> Reserved:
    return simulate(events, expandable_segments=False, capacity_bytes=capacity_bytes)


def growing(*events: AllocatorEvent, capacity_bytes: int | None = None) -> Reserved:
    return simulate(events, expandable_segments=True, capacity_bytes=capacity_bytes)


def take(key: int, nbytes: int, stream: int = 0) -> AllocatorEvent:
    return AllocatorEvent(key, nbytes, stream)


def drop(key: int) -> AllocatorEvent:
    return AllocatorEvent(key, 0)


# --- sizes and segments ---------------------------------------------------------------------------------------------


def test_no_events_reserve_nothing() -> None:
    assert classic() == Reserved(peak_reserved_bytes=0, peak_allocated_bytes=0)


def test_one_byte_takes_512_of_a_2_mib_segment() -> None:
    found = classic(take(1, 1))
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (512, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),  # the largest small one
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_sizes(size: int, segment: int) -> None:
    assert segment_bytes(size) == segment
    assert classic(take(1, size)).peak_reserved_bytes == segment


def test_small_and_large_have_pools_of_their_own() -> None:
    # 20 MiB hold 16 MiB free, but not for a small request
    assert classic(take(1, 4 * MIB), take(2, MIB)).peak_reserved_bytes == 22 * MIB


def test_streams_have_pools_of_their_own() -> None:
    one = [take(1, 30 * MIB), drop(1), take(2, 30 * MIB)]
    two = [take(1, 30 * MIB), drop(1), take(2, 30 * MIB, stream=1)]
    assert classic(*one).peak_reserved_bytes == 30 * MIB
    assert classic(*two).peak_reserved_bytes == 60 * MIB
    assert growing(*two).peak_reserved_bytes == 80 * MIB  # two granules each


# --- split, merge, best fit -----------------------------------------------------------------------------------------


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    whole = classic(take(1, 30 * MIB), drop(1), take(2, 29 * MIB), take(3, 30 * MIB))
    assert whole.peak_allocated_bytes == 60 * MIB  # the 29 have all of the first segment
    barely = classic(take(1, 30 * MIB), drop(1), take(2, 29 * MIB - 512), take(3, 30 * MIB))
    assert barely.peak_allocated_bytes == 59 * MIB - 512
    split = classic(take(1, 30 * MIB), drop(1), take(2, 28 * MIB), take(3, 2 * MIB))
    assert (split.peak_reserved_bytes, split.peak_allocated_bytes) == (30 * MIB, 30 * MIB)


def test_a_small_block_is_split_to_the_last_512_bytes() -> None:
    tiny = [take(key, 512) for key in range(4096)]  # 2 MiB exactly
    assert classic(*tiny).peak_reserved_bytes == 2 * MIB
    assert classic(*tiny, take(-1, 1)).peak_reserved_bytes == 4 * MIB


def test_a_growing_segment_splits_large_blocks_to_the_last_512_bytes() -> None:
    found = growing(take(1, 20 * MIB), drop(1), take(2, 20 * MIB - 512), take(3, 20 * MIB))
    assert found.peak_allocated_bytes == 40 * MIB - 512
    assert found.peak_reserved_bytes == 40 * MIB  # 512 B were free: 19.9995 more take one granule


def test_free_neighbours_merge_on_both_sides() -> None:
    three = [take(1, 6 * MIB), take(2, 6 * MIB), take(3, 8 * MIB)]  # fill one segment of 20 MiB
    for order in ([1, 2, 3], [3, 2, 1], [1, 3, 2]):
        assert classic(*three, *map(drop, order), take(4, 20 * MIB)).peak_reserved_bytes == 20 * MIB
    assert classic(*three, drop(1), drop(3), take(4, 14 * MIB)).peak_reserved_bytes == 34 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    # free: 40 and 30 MiB. 30 must go to the block of 30, or the 40 that follows needs a new segment.
    events = [take(1, 40 * MIB), take(2, 30 * MIB), drop(1), drop(2), take(3, 30 * MIB), take(4, 40 * MIB)]
    assert classic(*events).peak_reserved_bytes == 70 * MIB


def test_a_key_taken_again_is_freed_after_the_new_block_exists() -> None:
    # as a storage is resized: both exist for a moment
    assert classic(take(1, 30 * MIB), take(1, 40 * MIB)).peak_allocated_bytes == 70 * MIB
    assert classic(take(1, 30 * MIB), take(1, 40 * MIB), take(2, 30 * MIB)).peak_reserved_bytes == 70 * MIB


def test_an_unknown_key_frees_nothing() -> None:
    assert classic(drop(7), take(1, 30 * MIB)).peak_reserved_bytes == 30 * MIB


# --- growing segments -----------------------------------------------------------------------------------------------


def test_growth_is_by_granules() -> None:
    assert growing(take(1, 21 * MIB)).peak_reserved_bytes == 40 * MIB
    assert growing(take(1, 21 * MIB), take(2, 19 * MIB)).peak_reserved_bytes == 40 * MIB
    assert growing(take(1, 21 * MIB), take(2, 20 * MIB)).peak_reserved_bytes == 60 * MIB  # 19 of them were there
    assert growing(take(1, 1), take(2, MIB), take(3, MIB)).peak_reserved_bytes == 4 * MIB


def test_what_classic_wastes_a_growing_segment_joins() -> None:
    events = [take(1, 30 * MIB), take(2, 30 * MIB), drop(1), drop(2), take(3, 60 * MIB)]
    assert classic(*events).peak_reserved_bytes == 120 * MIB
    assert growing(*events).peak_reserved_bytes == 60 * MIB


def test_the_growing_end_loses_to_a_larger_block_inside() -> None:
    # [20 free][20 used][10 free, can grow]: 10 MiB go to the 20, though the end would fit exactly.
    inside = [take(1, 20 * MIB), take(2, 20 * MIB), take(3, 10 * MIB), drop(1)]
    # so that 20 more must grow the end: 10 are there, 10 are missing, one granule
    assert growing(*inside, take(4, 10 * MIB), take(5, 20 * MIB)).peak_reserved_bytes == 80 * MIB
    # had the end been taken, the 20 inside would have been left for key 5 and 60 had been enough
    assert growing(*inside, take(5, 20 * MIB), take(4, 10 * MIB)).peak_reserved_bytes == 60 * MIB


# --- a full device --------------------------------------------------------------------------------------------------


def test_a_full_device_gives_cached_segments_back() -> None:
    events = [take(1, 30 * MIB), drop(1), take(2, 40 * MIB)]
    assert classic(*events).peak_reserved_bytes == 70 * MIB
    found = classic(*events, capacity_bytes=40 * MIB)
    assert (found.peak_reserved_bytes, found.out_of_memory) == (40 * MIB, False)


def test_a_segment_in_part_use_cannot_go_back() -> None:
    events = [take(1, 4 * MIB), take(2, 16 * MIB), drop(2), take(3, 20 * MIB)]
    found = classic(*events, capacity_bytes=39 * MIB)
    assert (found.peak_reserved_bytes, found.out_of_memory) == (20 * MIB, True)
    assert not classic(*events, capacity_bytes=40 * MIB).out_of_memory


@pytest.mark.parametrize(
    "before",
    [
        [take(1, 50 * MIB), take(2, 10 * MIB), drop(1)],  # [50 free][10 used]: granules 1 and 2 of 3 are free
        [take(2, 10 * MIB), take(1, 50 * MIB), drop(1)],  # [10 used][50 free]: granules 2 and 3
    ],
)
def test_a_growing_segment_gives_back_whole_free_granules(before: list[AllocatorEvent]) -> None:
    other = take(3, 40 * MIB, stream=1)
    assert growing(*before, other).peak_reserved_bytes == 100 * MIB
    assert not growing(*before, other, capacity_bytes=60 * MIB).out_of_memory
    # 20 + 40 are taken, a small segment is 2
    assert not growing(*before, other, take(4, 1), capacity_bytes=62 * MIB).out_of_memory
    assert growing(*before, other, take(4, 1), capacity_bytes=61 * MIB).out_of_memory


def test_a_gap_is_mapped_again_before_the_end_grows() -> None:
    # after stream 1 is through, the gap [0, 40) of stream 0 takes 50 MiB together with the 10 free behind it
    events = [take(1, 50 * MIB), take(2, 10 * MIB), drop(1), take(3, 40 * MIB, stream=1), drop(3)]
    found = growing(*events, take(4, 50 * MIB), capacity_bytes=60 * MIB)
    assert not found.out_of_memory


def test_what_is_asked_at_once_must_fit_at_once() -> None:
    found = growing(take(1, 30 * MIB), take(2, 30 * MIB), capacity_bytes=50 * MIB)
    assert found == Reserved(
        peak_reserved_bytes=40 * MIB,
        peak_allocated_bytes=30 * MIB,
        out_of_memory=True,
    )


# --- any trace ------------------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB), st.sampled_from([MIB, 10 * MIB, 20 * MIB]))
STEPS = st.lists(st.tuples(st.integers(0, 9), st.one_of(st.just(0), SIZES), st.integers(0, 1)), max_size=60)


def as_events(steps: list[tuple[int, int, int]]) -> list[AllocatorEvent]:
    return [AllocatorEvent(*step) for step in steps]


@settings(max_examples=150)
@given(steps=STEPS, expandable=st.booleans())
def test_reserved_covers_allocated_and_never_shrinks(steps: list[tuple[int, int, int]], expandable: bool) -> None:
    events = as_events(steps)
    found = [simulate(events[:end], expandable_segments=expandable) for end in range(len(events) + 1)]
    assert all(one.peak_reserved_bytes >= one.peak_allocated_bytes for one in found)
    reserved = [one.peak_reserved_bytes for one in found]
    assert reserved == sorted(reserved)


@settings(max_examples=150)
@given(steps=STEPS)
def test_allocated_is_what_was_asked_rounded(steps: list[tuple[int, int, int]]) -> None:
    live: dict[int, int] = {}
    peak = 0
    for key, nbytes, _ in steps:
        size = -(-nbytes // 512) * 512
        peak = max(peak, sum(live.values()) + size)
        live[key] = size
    assert simulate(as_events(steps), expandable_segments=True).peak_allocated_bytes == peak
    # classic blocks may keep up to 1 MiB that is not worth a split
    slack = simulate(as_events(steps), expandable_segments=False).peak_allocated_bytes - peak
    assert 0 <= slack <= MIB * 11  # ten keys, and one being replaced


@settings(max_examples=150)
@given(steps=STEPS)
def test_the_same_trace_again_reserves_nothing_more(steps: list[tuple[int, int, int]]) -> None:
    """Once all is free a growing segment is one block, so a step that repeats lands where it was.

    Classic segments have no such law: a request that had a segment cut for it may come to sit in a larger one.
    """
    events = [*as_events(steps), *(drop(key) for key in range(10))]
    once = simulate(events, expandable_segments=True)
    assert simulate(events * 2, expandable_segments=True).peak_reserved_bytes == once.peak_reserved_bytes


@settings(max_examples=150)
@given(steps=STEPS, expandable=st.booleans(), capacity_mib=st.integers(20, 200))
def test_a_capacity_is_never_passed(steps: list[tuple[int, int, int]], expandable: bool, capacity_mib: int) -> None:
    capacity = capacity_mib * MIB
    found = simulate(as_events(steps), expandable_segments=expandable, capacity_bytes=capacity)
    assert found.peak_reserved_bytes <= capacity
    unlimited = simulate(as_events(steps), expandable_segments=expandable)
    if unlimited.peak_reserved_bytes <= capacity:
        assert found == unlimited
    if found.out_of_memory:
        assert unlimited.peak_reserved_bytes > capacity


def test_a_long_trace_takes_about_a_second() -> None:
    rng = random.Random(0)
    events = []
    for key in range(50_000):
        events.append(take(key, rng.choice((3 * KIB, 700 * KIB, 5 * MIB, 64 * MIB)) + rng.randrange(64) * 512))
        if key >= 2000:
            events.append(drop(key - rng.randrange(1000, 2000)))
    for expandable in (False, True):
        began_s = time.process_time()
        simulate(events, expandable_segments=expandable)
        assert time.process_time() - began_s < 5  # 0.5 s on a free core


def test_the_least_capacity_is_where_the_trace_still_ends() -> None:
    """Two streams take turns: neither can use what the other cached, but the device can take it back."""
    events = [
        AllocatorEvent(1, 400 * MIB, 0),
        AllocatorEvent(1, 0, 0),
        AllocatorEvent(2, 400 * MIB, 1),
        AllocatorEvent(2, 0, 1),
        AllocatorEvent(3, 100 * MIB, 0),
    ]
    wanted = simulate(events, expandable_segments=True).peak_reserved_bytes
    least = least_capacity(events, expandable_segments=True)
    assert wanted == 800 * MIB
    assert 400 * MIB <= least <= 410 * MIB
    assert not simulate(events, expandable_segments=True, capacity_bytes=least).out_of_memory
    assert simulate(events, expandable_segments=True, capacity_bytes=399 * MIB).out_of_memory
