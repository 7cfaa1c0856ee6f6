"""The balanced order of a global batch: any contiguous equal parts of it have nearly equal attention work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.data_spec import DataSpec
from weft.data import open_corpus
from weft.data.balance import balanced_order, largest_part, work_of
from weft.data.document_length import document_length_of, find_document_length
from weft.data.loader import Loader
from weft.data.mixture import MixedSource, Mixture
from weft.data.preview import _of_balance
from weft.data.rows import RowLayout
from weft.data.split import Split, split_documents
from weft.data.streaming import StreamingLoader

END = 60000
WORKS = st.integers(1, 10**9)


def works(multiple: int) -> st.SearchStrategy[list[int]]:
    """Works of a multiple of so many rows."""
    counts = st.integers(1, 9).map(lambda count: count * multiple)
    return counts.flatmap(lambda count: st.lists(WORKS, min_size=count, max_size=count))


def parts_of(work: list[int], count: int) -> Any:
    values = np.array(work, dtype=np.int64)
    return values[balanced_order(values)].reshape(count, -1).sum(axis=1)


@settings(max_examples=150)
@given(data=st.data(), count=st.sampled_from([2, 4, 8, 16]))
def test_powers_of_two_differ_by_at_most_twice_the_spread_of_rows(data: st.DataObject, count: int) -> None:
    """The parts are the groups of one level."""
    work = data.draw(works(count))
    sums = parts_of(work, count)
    assert sums.max() - sums.min() <= 2 * (max(work) - min(work))


@settings(max_examples=150)
@given(data=st.data(), count=st.sampled_from([3, 5, 6, 7, 9, 10, 11, 13, 15]))
def test_parts_of_any_number_stay_near_their_mean(data: st.DataObject, count: int) -> None:
    """A part begins and ends inside of at most one group of each level."""
    work = data.draw(works(count))
    sums, spread = parts_of(work, count), max(work) - min(work)
    assert np.abs(sums - sums.mean()).max() <= (1 + math.log2(len(work))) * spread


@given(work=st.lists(WORKS, min_size=1, max_size=50))
def test_every_row_has_one_place(work: list[int]) -> None:
    assert sorted(balanced_order(np.array(work, dtype=np.int64)).tolist()) == list(range(len(work)))


def test_rows_of_equal_work_keep_their_order() -> None:
    assert balanced_order(np.full(12, 9, dtype=np.int64)).tolist() == list(range(12))


def test_packed_rows_are_far_better_balanced_than_as_drawn() -> None:
    """Rows of one long document among rows of short ones: 240 rows of 4,096 tokens."""
    draw = np.random.default_rng(3)
    work = np.array([work_of(_documents(draw, 4096)) for _ in range(240)], dtype=np.int64)
    balanced = work[balanced_order(work)]
    for parts in (2, 3, 4, 5, 6, 8, 10, 16):
        drawn, found = largest_part(work, parts=parts), largest_part(balanced, parts=parts)
        assert found - 1 < (drawn - 1) / 4, (parts, drawn, found)


def _documents(draw: np.random.Generator, length: int) -> Any:
    """Lengths of documents that fill a row."""
    found: list[int] = []
    while sum(found) < length:
        found.append(min(length - sum(found), int(draw.lognormal(6.0, 1.5)) + 1))
    return np.array(found)


def make_split(lengths: list[int]) -> Split:
    """Documents whose tokens are all different."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens[offsets[1:] - 1] = END
    return split_documents(tokens, offsets, eval_fraction=0, vocab_size=END + 1, end_of_document=END)[0]


LENGTHS = np.random.default_rng(5).integers(2, 60, 400).tolist()
PACKED = RowLayout(sequence_length=32, packing="documents")
STREAM = RowLayout(sequence_length=32, isolate_documents=True)


def make_loader(layout: RowLayout, *, balances: bool = True, **changes: Any) -> Loader:
    return Loader(
        make_split(LENGTHS), layout=layout, balances=balances, **{"seed": 1, "global_batch": 24, "epochs": 2, **changes}
    )


def work_in(batch: dict[str, torch.Tensor]) -> Any:
    """Of each row, by the positions that restart."""
    rows = [np.append(np.flatnonzero(row == 0), len(row)) for row in batch["position_ids"].numpy()]
    return np.array([work_of(np.diff(borders)) for borders in rows])


@pytest.mark.parametrize("layout", [PACKED, STREAM], ids=["documents", "concatenate"])
def test_work_of_rows_is_that_of_their_positions(layout: RowLayout) -> None:
    loader = make_loader(layout)
    rows = np.arange(loader.num_rows)
    read = {key: torch.from_numpy(values) for key, values in loader.rows.read(rows).items()}
    assert loader.rows.work(rows).tolist() == work_in(read).tolist()


@pytest.mark.parametrize("layout", [PACKED, STREAM], ids=["documents", "concatenate"])
def test_a_global_batch_has_the_same_samples_and_ranks_equal_work(layout: RowLayout) -> None:
    drawn, balanced = make_loader(layout, balances=False), make_loader(layout)
    for position in (0, 24, 48):
        before, after = drawn.batch(position), balanced.batch(position)
        rows = [{tuple(row) for row in batch["input_ids"].tolist()} for batch in (before, after)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 24
        work, sorted_work = work_in(before), work_in(after)
        assert largest_part(sorted_work, parts=4) < 1 + (largest_part(work, parts=4) - 1) / 2
        assert balanced.rows_of(balanced.samples(position)).tolist() != drawn.rows_of(drawn.samples(position)).tolist()


@pytest.mark.parametrize("layout", [PACKED, STREAM], ids=["documents", "concatenate"])
def test_the_order_is_the_same_on_any_number_of_ranks(layout: RowLayout) -> None:
    whole = make_loader(layout).batch(24)
    for degree in (2, 3, 8):
        parts = [make_loader(layout, dp_rank=rank, dp_degree=degree).batch(24) for rank in range(degree)]
        for key, values in whole.items():
            assert torch.equal(torch.cat([part[key] for part in parts]), values)


def test_batches_of_two_epochs_and_uneven_tails_stay_as_drawn() -> None:
    drawn, balanced = make_loader(PACKED, balances=False), make_loader(PACKED)
    end = balanced.num_rows
    assert end % 24
    for position in (end // 24 * 24, (2 * end - 1) // 24 * 24):
        before, after = drawn.batch(position), balanced.batch(position)
        assert all(torch.equal(before[key], after[key]) for key in before)


def test_only_rows_of_isolated_documents_are_balanced() -> None:
    assert not DataSpec().balances
    assert not DataSpec(packing="none").balances
    assert DataSpec(packing="documents").balances
    assert DataSpec(isolate_documents=True).balances
    assert not DataSpec(packing="documents", balance_rows=False).balances
    only_evaluated = DataSpec.model_validate({"evaluation": [{"name": "a", "source": "a", "format": "chat"}]})
    assert not only_evaluated.balances


def test_mixtures_are_balanced_too() -> None:
    sources = tuple(MixedSource(name, make_split(LENGTHS), layout, 1.0) for name, layout in
                    (("packed", PACKED), ("whole", RowLayout(sequence_length=32))))  # fmt: skip
    loader, drawn = (
        Loader(Mixture(sources, by_tokens=False), seed=1, global_batch=16, layout=PACKED, balances=balances)
        for balances in (True, False)
    )
    order = loader.samples(16)
    assert sorted(order.tolist()) == list(range(16, 32))
    work = work_in(loader.batch(16))
    assert work.tolist() == loader.rows.work(loader.rows_of(order)).tolist()
    assert largest_part(work, parts=4) < largest_part(work_in(drawn.batch(16)), parts=4)


def test_streams_are_balanced_too(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(f'{{"text": "{"x" * int(length)}"}}\n' for length in draw.integers(2, 60, 200)))
    given = {"source": str(text), "streaming": True, "shuffle_window": 60, "sequence_length": 32, "eval_fraction": 0.0}
    found = {}
    for balances in (True, False):
        data = DataSpec(**given, tokenizer="bytes", packing="documents", balance_rows=balances)
        for degree in (1, 4):
            ranks = [
                StreamingLoader(
                    data, seed=1, global_batch=16, dp_rank=rank, dp_degree=degree, cache_dir=tmp_path / "cache"
                )
                for rank in range(degree)
            ]
            found[balances, degree] = [
                torch.cat([rank.batch(at)["position_ids"] for rank in ranks]) for at in (0, 16, 32, 48)
            ]
    for at in range(4):
        assert torch.equal(found[True, 1][at], found[True, 4][at])
        balanced, drawn = (work_in({"position_ids": found[key, 1][at]}) for key in (True, False))
        assert sorted(balanced) == sorted(drawn)
        assert largest_part(balanced, parts=4) < largest_part(drawn, parts=4)


def test_the_mean_document_is_the_sum_of_squares_over_the_length_of_rows() -> None:
    for layout in (PACKED, STREAM):
        loader = make_loader(layout)
        read = {key: torch.from_numpy(values) for key, values in loader.rows.read(np.arange(loader.num_rows)).items()}
        assert document_length_of(loader) == pytest.approx(work_in(read).mean() / 32)
    assert document_length_of(make_loader(RowLayout(sequence_length=32))) == 32


def test_the_mean_document_of_cached_tokens_is_found(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "abcdefg"}\n{"text": "abc"}\n' * 20)
    data = DataSpec(
        source=str(tmp_path / "rows.jsonl"), tokenizer="bytes", packing="documents", sequence_length=10,
        eval_fraction=0.0,
    )  # fmt: skip
    assert find_document_length(data, cache_dir=tmp_path) is None
    open_corpus(data, cache_dir=tmp_path)
    assert find_document_length(data, cache_dir=tmp_path) == (7**2 + 3**2) / 10


def test_the_preview_says_what_the_busiest_rank_has() -> None:
    ranks = make_loader(PACKED, dp_degree=4)
    work = [work_in(make_loader(PACKED, balances=balances).batch(24)) for balances in (True, False)]
    found, drawn = (largest_part(each, parts=4) for each in work)
    told = _of_balance(ranks, 24)
    assert told == [
        f"attention work of the busiest of 4 data-parallel ranks in the first batch: {found:.3f} of their mean"
        f" ({drawn:.3f} as drawn)"
    ]
    assert (
        _of_balance(make_loader(PACKED), 24) == _of_balance(make_loader(PACKED, balances=False, dp_degree=4), 24) == []
    )
