"""Boxes of shards: together they are the whole, each as often as it says, and a shard of a shard keeps its chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.shards import (
    LocalShard,
    Span,
    balanced_span,
    compose,
    even_span,
    local_shard,
    replicated_shard,
    zero_dim,
)


def local_of(shard: LocalShard, whole: np.ndarray) -> np.ndarray:
    made = np.full(shard.local_shape, -1)
    for chunk in shard.chunks:
        made[chunk.local_index] = whole[chunk.global_index]
    return made


@given(size=st.integers(1, 40), degree=st.integers(1, 8))
def test_uneven_runs_are_the_whole_once(size: int, degree: int) -> None:
    runs = [even_span(size, degree=degree, place=place) for place in range(degree)]
    assert [index for run in runs for index in range(run.begin, run.begin + run.size)] == list(range(size))


@given(size=st.integers(0, 40), degree=st.integers(1, 8))
def test_balanced_runs_are_the_whole_once_and_differ_by_one(size: int, degree: int) -> None:
    runs = [balanced_span(size, degree=degree, place=place) for place in range(degree)]
    assert [index for run in runs for index in range(run.begin, run.begin + run.size)] == list(range(size))
    assert {run.size for run in runs} <= {size // degree, -(-size // degree)}


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
            runs.append(Span(begin=begin + place * units // degree * size, size=count * size, copies=copies))
            begin += units * size
        shard = local_shard(whole.shape, {0: runs}, summed_over={2: "repeat2", 4: "repeat4"})
        own = local_of(shard, whole)
        assert (own >= 0).all(), "a place of the own tensor has no chunk"
        for chunk in shard.chunks:
            seen[chunk.global_index] += 1
            promised[chunk.global_index] = chunk.copies
            assert chunk.summed_over == (f"repeat{chunk.copies}" if chunk.copies > 1 else None)
    assert (seen == promised).all()


@given(rows=st.integers(1, 12), shards=st.integers(1, 4), runs=st.integers(1, 3))
def test_a_shard_of_a_part_has_the_values_of_its_rows(rows: int, shards: int, runs: int) -> None:
    whole = np.arange(runs * 2 * rows * 3).reshape(-1, 3)
    shard = local_shard(whole.shape, {0: [Span(begin=2 * index * rows, size=rows) for index in range(runs)]})
    own = local_of(shard, whole)
    num_rows = -(-len(own) // shards)
    for place in range(shards):
        first = min(place * num_rows, len(own))
        expected = own[first : first + num_rows]
        made = np.full(expected.shape, -1)
        for chunk in shard.within((slice(first, first + len(expected)), slice(0, 3))):
            made[chunk.local_index] = whole[chunk.global_index]
        assert (made == expected).all()


def test_a_whole_part_is_not_cut() -> None:
    shard = replicated_shard((3, 2), copies=4, summed_over="tp")
    assert not shard.is_sharded
    assert shard.chunks[0].copies == 4
    assert shard.within((slice(1, 3), slice(0, 2)))[0].offsets == (1, 0)


@given(experts=st.integers(1, 3), rows=st.integers(1, 6), shards=st.integers(1, 4))
def test_a_shard_of_an_inner_dimension_has_its_values(experts: int, rows: int, shards: int) -> None:
    """Rows of [experts, gate | up, 2]: a tensor rank has half of both segments, a shard of it may cross them."""
    whole = np.arange(experts * 4 * rows * 2).reshape(experts, 4 * rows, 2)
    shard = local_shard(whole.shape, {1: [Span(begin=0, size=rows), Span(begin=2 * rows, size=rows)]})
    own = local_of(shard, whole)
    for place in range(shards):
        span = even_span(own.shape[1], degree=shards, place=place)
        inside = (slice(0, experts), slice(span.begin, span.begin + span.size), slice(0, 2))
        made = np.full(own[inside].shape, -1)
        for chunk in shard.within(inside):
            made[chunk.local_index] = whole[chunk.global_index]
        assert (made == own[inside]).all()


def halves(size: int, *, place: int) -> list[Span]:
    """A rank's half of gate and of up."""
    return [Span(begin=place * size, size=size), Span(begin=(2 + place) * size, size=size)]


@given(experts=st.integers(4, 7), size=st.integers(1, 3), ep=st.integers(1, 4))
def test_shards_of_two_axes_are_the_whole_once(experts: int, size: int, ep: int) -> None:
    """Experts [experts, gate | up, 2] by their width over two ranks, and by their number over ep."""
    whole = np.arange(experts * 4 * size * 2).reshape(experts, 4 * size, 2)
    seen = np.zeros_like(whole)
    for tp_place, place in np.ndindex(2, ep):
        outer = local_shard(whole.shape, {1: halves(size, place=tp_place)})
        span = balanced_span(experts, degree=ep, place=place)
        shard = compose(outer, local_shard(outer.local_shape, {0: [span]}, axis="ep"))
        assert (local_of(shard, whole) == local_of(outer, whole)[span.begin : span.begin + span.size]).all()
        assert shard.sharded_axes == (("ep", "tp") if ep > 1 else ("tp",))
        for chunk in shard.chunks:
            seen[chunk.global_index] += 1
            assert chunk.copies == 1
    assert (seen == 1).all()


def test_an_axis_that_replicates_shards_nothing_in_a_composition() -> None:
    """Its sum of gradients stays; its copies would divide the norm of the other axis's shards."""
    outer = replicated_shard((4, 6), copies=2, summed_over="tp")
    shard = compose(outer, local_shard((4, 6), {0: [Span(begin=2, size=2)]}, axis="ep"))
    assert shard.sharded_axes == ("ep",)
    [chunk] = shard.chunks
    assert (chunk.offsets, chunk.local_offsets, chunk.copies, chunk.summed_over) == ((2, 0), (0, 0), 1, "tp")


def test_copies_of_both_axes_multiply() -> None:
    outer = local_shard((4, 6), {1: [Span(begin=0, size=3, copies=2)]}, summed_over={2: "repeat2"})
    shard = compose(outer, local_shard((4, 3), {0: [Span(begin=2, size=2)]}, copies=3, axis="ep"))
    assert [(chunk.copies, chunk.summed_over) for chunk in shard.chunks] == [(6, "repeat2")]


@pytest.mark.parametrize(
    ("shape", "num_shards", "expected"),
    [
        ((8, 6, 4), 4, 0),
        ((2, 8, 4), 4, 1),
        ((7, 8, 4), 4, 1),  # 2, 2, 2 and 1 experts would be more than a quarter
        ((2, 6, 4), 4, 0),  # the last dimension is never sharded
        ((2, 3, 8, 5), 4, 2),
        ((3, 8), 4, 0),
        ((3,), 4, 0),
        ((), 4, 0),
    ],
)
def test_zero_shards_an_inner_dimension_where_rows_do_not_divide(
    shape: tuple[int, ...], num_shards: int, expected: int
) -> None:
    assert zero_dim(shape, num_shards=num_shards) == expected
