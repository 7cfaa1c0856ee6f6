"""Positions by rank: every one once, equal causal work under zig-zag."""

from __future__ import annotations

import pytest

from weft.core.sequence_split import SequenceSplit, padded_length, pairs_by_rank, spans_of, work_over_mean


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_every_position_is_on_one_rank(degree: int, split: SequenceSplit) -> None:
    length = padded_length(61, degree=degree, split=split)
    spans = [span for rank in range(degree) for span in spans_of(length, degree=degree, rank=rank, split=split)]
    assert sorted(position for span in spans for position in span) == list(range(length))
    assert len({sum(map(len, spans_of(length, degree=degree, rank=rank, split=split))) for rank in range(degree)}) == 1
    assert 61 <= length < 61 + 2 * degree


def test_padding_leaves_parts_that_sequence_parallel_divides() -> None:
    length = padded_length(10, degree=2, split="zigzag", multiple=3)
    assert length == 12
    assert length % 4 == length // 2 % 3 == 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_zigzag_has_equal_causal_work_and_contiguous_has_not(degree: int) -> None:
    zigzag, contiguous = (pairs_by_rank(4096, degree=degree, split=split) for split in ("zigzag", "contiguous"))
    assert max(zigzag) == min(zigzag)
    assert sum(zigzag) == sum(contiguous) == 4096 * 4097 // 2
    mean = sum(contiguous) / degree
    assert max(contiguous) / mean == pytest.approx((2 * degree - 1) / degree, rel=1e-3)


def test_padding_and_odd_lengths_stay_within_two_percent() -> None:
    pairs = pairs_by_rank(4091, degree=4, split="zigzag")
    assert max(pairs) / min(pairs) < 1.02


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_those_of_every_query(window: int | None) -> None:
    pairs = pairs_by_rank(61, degree=4, split="zigzag", window=window)
    assert sum(pairs) == sum(min(query + 1, window or 61) for query in range(61))


@pytest.mark.parametrize("group", [2, 4])
def test_neighbours_have_equal_work_as_fewer_ranks_would(group: int) -> None:
    shared = work_over_mean(4091, degree=8, split="zigzag", group=group)
    assert max(shared) / min(shared) < 1.02
    contiguous = work_over_mean(4096, degree=8, split="contiguous", group=group)
    fewer = work_over_mean(4096, degree=8 // group, split="contiguous")
    assert contiguous == pytest.approx([each for each in fewer for _ in range(group)])
    assert work_over_mean(4096, degree=8, split="contiguous", group=8) == pytest.approx([1.0] * 8)
