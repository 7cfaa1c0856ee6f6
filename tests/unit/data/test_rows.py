"""Rows of samples: every token once, labels with their tokens, padding without a loss; packing, truncation, order."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import BadValueError, DataError
from weft.core.run_spec import RunSpec
from weft.data.loader import Loader
from weft.data.packing import pack
from weft.data.rows import IGNORED, RowLayout, SampleRows, open_rows
from weft.data.split import Split, split_documents
from weft.data.words import counted_of, to_words, tokens_of

END = 99
LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=12)


def make_split(lengths: list[int], *, seed: int = 0, pairs: bool = False) -> Split:
    """Samples of tokens that name their place; about half of them count, the last one always."""
    draw = np.random.default_rng(seed)
    words = []
    for sample, length in enumerate(lengths):
        counted = draw.random(length) < 0.5
        counted[-1] = True
        words.append(to_words(100 + sample * 20 + np.arange(length), counted, vocab_size=1000))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate(words)
    return split_documents(
        tokens, offsets, eval_fraction=0, vocab_size=1000, end_of_document=END, has_mask=True, together=1 + pairs
    )[0]


def sample_of(split: Split, index: int) -> tuple[list[int], list[int]]:
    """(tokens, labels of the whole sample)."""
    words = split.tokens[slice(*split.bounds[index])]
    tokens = tokens_of(words, words.dtype)
    return tokens.tolist(), np.where(counted_of(words, words.dtype), tokens, IGNORED).tolist()


def segments(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(inputs, labels) of every stretch of rows in which positions count up, without padding."""
    found = []
    for row, inputs in enumerate(batch["input_ids"]):
        positions = batch["position_ids"][row] if "position_ids" in batch else np.arange(len(inputs))
        begins = [*np.flatnonzero(positions == 0).tolist(), len(inputs)]
        for begin, end in itertools.pairwise(begins):
            kept = [at for at in range(begin, end) if inputs[at] != END]
            assert all(batch["labels"][row, at] == IGNORED for at in range(begin, end) if at not in kept)
            if kept:
                found.append((inputs[kept].tolist(), batch["labels"][row, kept].tolist()))
    return found


@given(
    lengths=LENGTHS, packing=st.sampled_from(["none", "documents"]), length=st.integers(2, 12), seed=st.integers(0, 9)
)
def test_every_sample_is_in_one_row_with_its_labels(lengths: list[int], packing: Any, length: int, seed: int) -> None:
    split = make_split(lengths, seed=seed)
    rows = open_rows(split, RowLayout(sequence_length=length, packing=packing, truncation="drop"))
    batch = rows.read(np.arange(rows.num_rows))
    whole = [sample_of(split, index) for index in range(len(lengths))]
    expected = [(tokens[:-1], labels[1:]) for tokens, labels in whole if len(tokens) <= length + 1]
    assert sorted(segments(batch)) == sorted(expected)
    assert all(values.shape == (rows.num_rows, length) for values in batch.values())


@given(lengths=st.lists(st.integers(0, 30), max_size=60), room=st.integers(30, 90))
def test_packing_is_whole_and_fits(lengths: list[int], room: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), room=room)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in row) for row in rows]
    assert all(size <= room for size in sizes)
    assert len(rows) <= 2 * -(-sum(lengths) // room) + 1  # no two rows are at most half full


def test_best_fit_fills_the_fullest_row_that_has_room() -> None:
    rows = pack(np.array([6, 5, 4, 3, 2]), room=10)
    assert sorted(map(sorted, rows)) == [[0, 2], [1, 3, 4]]


@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8), length=st.integers(2, 12), seed=st.integers(0, 9))
def test_split_pieces_count_every_label_once(lengths: list[int], length: int, seed: int) -> None:
    split = make_split(lengths, seed=seed)
    rows = open_rows(split, RowLayout(sequence_length=length, packing="documents", truncation="split"))
    labels = rows.read(np.arange(rows.num_rows))["labels"]
    expected = [label for index in range(len(lengths)) for label in sample_of(split, index)[1][1:] if label != IGNORED]
    assert sorted(labels[labels != IGNORED].tolist()) == sorted(expected)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("end", [100, 101, 102, 103]), ("start", [105, 106, 107, 108]), ("drop", None)],
)
def test_truncation(truncation: Any, expected: list[int] | None) -> None:
    split = make_split([10, 3], seed=1)
    rows = open_rows(split, RowLayout(sequence_length=4, packing="none", truncation=truncation))
    assert isinstance(rows, SampleRows)
    found = [row[row != END].tolist() for row in rows.read(np.arange(rows.num_rows))["input_ids"]]
    assert found == ([expected] if expected else []) + [[120, 121]]
    assert (rows.pieces.num_samples, rows.pieces.num_long) == (2, 1)


def test_a_sample_that_truncation_leaves_without_a_label_is_left_out() -> None:
    words = to_words(np.arange(10), np.arange(10) > 7, vocab_size=100)
    offsets = np.array([0, 10], dtype=np.int64)
    split = split_documents(words, offsets, eval_fraction=0, vocab_size=100, end_of_document=99, has_mask=True)[0]
    with pytest.raises(DataError, match="no sample is left of 1: 1 are longer than a row"):
        Loader(split, seed=0, global_batch=1, layout=RowLayout(sequence_length=4, packing="none", truncation="end"))


def test_pairs_are_two_rows_each_and_go_together() -> None:
    split = make_split([4, 5, 3, 12, 6, 6], pairs=True)
    layout = RowLayout(sequence_length=8, packing="none", truncation="drop", is_paired=True)
    loader = Loader(split, seed=0, global_batch=2, layout=layout, shuffle=False, epochs=1)
    assert loader.num_rows == 2  # the second pair has one answer that is too long
    batch = loader.batch(0)
    assert batch["input_ids"].shape == (4, 8)
    assert batch["input_ids"][:, 0].tolist() == [100, 120, 180, 200]
    shares = [
        Loader(split, seed=0, global_batch=2, layout=layout, shuffle=False, dp_rank=rank, dp_degree=2).batch(0)
        for rank in (0, 1)
    ]
    assert [share["input_ids"][:, 0].tolist() for share in shares] == [[100, 120], [180, 200]]


@given(
    lengths=LENGTHS, packing=st.sampled_from(["none", "documents", "concatenate"]), seed=st.integers(0, 3),
    position=st.integers(0, 40), epochs=st.one_of(st.none(), st.integers(1, 3)),
)  # fmt: skip
def test_order_is_a_function_of_seed_and_samples_consumed(
    lengths: list[int], packing: Any, seed: int, position: int, epochs: int | None
) -> None:
    """Also at the end of finite data: rows beyond it have no label, on whatever rank they lie."""
    split = make_split([*lengths, 13], seed=seed)
    layout = RowLayout(sequence_length=6, packing=packing, truncation="split")
    run: dict[str, Any] = {"seed": seed, "layout": layout, "epochs": epochs}
    whole = Loader(split, global_batch=4, **run)
    if not whole.has_batch(position):
        return
    batch = whole.batch(position)
    ranks = [Loader(split, global_batch=4, dp_rank=rank, dp_degree=2, **run).batch(position) for rank in (0, 1)]
    single = Loader(split, global_batch=1, **run)
    for key, values in batch.items():
        assert np.array_equal(np.concatenate([part[key] for part in ranks]), values)
    for row in range(4):
        if single.has_batch(position + row):
            one = single.batch(position + row)
            assert all(np.array_equal(one[key][0], values[row]) for key, values in batch.items())
        else:
            assert (batch["labels"][row] == IGNORED).all()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"packing": "documents", "isolate_documents": True}, "isolate_documents is for packing = 'concatenate'"),
        ({"truncation": "end"}, "truncation is for packing = 'none' and 'documents'"),
        ({"format": "preference", "packing": "documents"}, "pairs of format = 'preference' are not packed"),
        ({"format": "preference", "truncation": "split"}, "pairs of format = 'preference' cannot be split"),
        ({"chat_template": "x"}, "chat_template is for the formats"),
        ({"train_on": "last"}, "train_on is for format = 'chat'"),
        ({"format": "chats"}, "Input should be 'text', 'chat'"),
    ],
)
def test_keys_that_do_not_fit_together(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadValueError, match=sentence):
        RunSpec.from_tables({"model": {"type": "llama"}, "data": data})
