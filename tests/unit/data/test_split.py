"""Held out by document: a fixed rule without a seed; the two splits together are the corpus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.split import held_out_documents, split_documents


@settings(max_examples=100)
@given(num_documents=st.integers(1, 300), fraction=st.floats(0, 0.999))
def test_at_least_one_and_never_all(num_documents: int, fraction: float) -> None:
    held_out = held_out_documents(num_documents, fraction=fraction)
    if fraction == 0 or num_documents < 2:
        assert len(held_out) == 0
    else:
        assert 1 <= len(held_out) < num_documents
    assert np.array_equal(np.unique(held_out), held_out)


@pytest.mark.parametrize("fraction", [0.02, 0.5, 0.9])
def test_the_share_is_about_the_fraction(fraction: float) -> None:
    num_documents = 20_000
    count = len(held_out_documents(num_documents, fraction=fraction))
    deviation = np.sqrt(num_documents * fraction * (1 - fraction))
    assert abs(count - num_documents * fraction) < 5 * deviation


def test_the_held_out_documents_are_pinned() -> None:
    """A change here moves documents that a finished run trained on into the held-out split."""
    assert held_out_documents(100, fraction=0.05).tolist() == [27, 70, 88, 98]


def test_a_larger_fraction_only_adds_and_more_documents_move_none() -> None:
    few, many = held_out_documents(5000, fraction=0.05), held_out_documents(5000, fraction=0.2)
    assert set(few) < set(many)
    longer = held_out_documents(8000, fraction=0.05)
    assert np.array_equal(longer[longer < 5000], few)


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=40), fraction=st.floats(0, 0.9), data=st.data())
def test_splits_read_their_documents_in_order(lengths: list[int], fraction: float, data: st.DataObject) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    training, evaluation = split_documents(tokens, offsets, eval_fraction=fraction, vocab_size=9, end_of_document=0)
    held_out = set(held_out_documents(len(lengths), fraction=fraction).tolist())
    for split, wanted in ((training, set(range(len(lengths))) - held_out), (evaluation, held_out)):
        if split is None:
            assert not wanted
            continue
        stream = np.concatenate([tokens[offsets[d] : offsets[d + 1]] for d in sorted(wanted)])
        assert split.num_tokens == len(stream)
        assert split.num_documents == len(wanted)
        start = data.draw(st.integers(0, len(stream) - 1))
        length = data.draw(st.integers(1, len(stream) - start))
        assert np.array_equal(split.read(np.array([start]), length=length)[0], stream[start : start + length])
