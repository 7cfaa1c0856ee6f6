"""Boxes of parts: together they are the whole, each as often as it says, and a shard of a part keeps its boxes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.core.shards import Part, Run, even_span, local_shard, replicated_shard


def local_of(part: Part, whole: np.ndarray) -> np.ndarray:
    made = np.full(part.local_shape, -1)
    for box in part.boxes:
        made[box.local_index] = whole[box.global_index]
    return made


@given(size=st.integers(1, 40), degree=st.integers(1, 8))
def test_uneven_runs_are_the_whole_once(size: int, degree: int) -> None:
    runs = [even_span(size, degree=degree, place=place) for place in range(degree)]
    assert [index for run in runs for index in range(run.begin, run.begin + run.size)] == list(range(size))


@given(
    heads=st.sampled_from([4, 8]), kv=st.sampled_from([1, 2, 4, 8]), size=st.integers(1, 3), width=st.integers(1, 4),
    degree=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_parts_of_a_fused_matrix_cover_it_as_often_as_their_copies_say(
    heads: int, kv: int, size: int, width: int, degree: int
) -> None:
    """[q | k | v] rows: q dealt out, k and v repeated where they are fewer than ranks."""
    whole = np.arange((heads + 2 * kv) * size * width).reshape(-1, width)
    seen = np.zeros_like(whole)
    promised = np.zeros_like(whole)
    for place in range(degree):
        runs, begin = [], 0
        for units in (heads, kv, kv):
            count = max(1, units // degree)
            copies = max(1, degree // units)
            runs.append(Run(begin=begin + place * units // degree * size, size=count * size, copies=copies))
            begin += units * size
        part = local_shard(whole.shape, {0: runs}, summed_over={2: "repeat2", 4: "repeat4"})
        own = local_of(part, whole)
        assert (own >= 0).all(), "a place of the own tensor has no box"
        for box in part.boxes:
            seen[box.global_index] += 1
            promised[box.global_index] = box.copies
            assert box.summed_over == (f"repeat{box.copies}" if box.copies > 1 else None)
    assert (seen == promised).all()


@given(rows=st.integers(1, 12), shards=st.integers(1, 4), runs=st.integers(1, 3))
def test_a_shard_of_a_part_has_the_values_of_its_rows(rows: int, shards: int, runs: int) -> None:
    whole = np.arange(runs * 2 * rows * 3).reshape(-1, 3)
    part = local_shard(whole.shape, {0: [Run(begin=2 * index * rows, size=rows) for index in range(runs)]})
    own = local_of(part, whole)
    chunk = -(-len(own) // shards)
    for shard in range(shards):
        first = min(shard * chunk, len(own))
        expected = own[first : first + chunk]
        made = np.full(expected.shape, -1)
        for box in part.within(first, len(expected)):
            made[box.local_index] = whole[box.global_index]
        assert (made == expected).all()


def test_a_whole_part_is_not_cut() -> None:
    part = replicated_shard((3, 2), copies=4, summed_over="tp")
    assert not part.is_cut
    assert part.boxes[0].copies == 4
    assert part.within(1, 2)[0].offsets == (1, 0)
