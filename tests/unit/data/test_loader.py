"""A batch is a pure function of (position, seed): the same rows at any dp degree, after any resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import BatchError, DataError
from weft.data.loader import Loader
from weft.data.rows import RowLayout
from weft.data.split import Split, split_documents

END = 60000


def make_split(lengths: list[int], *, eval_fraction: float = 0.0) -> Split:
    """Documents whose tokens are all different, so that a wrong row cannot look right."""
    pieces = [np.append(np.arange(length - 1), END) for length in lengths]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.concatenate(pieces)
    ordinary = tokens != END
    tokens[ordinary] = np.arange(ordinary.sum())
    training, _ = split_documents(
        tokens.astype(np.uint16), offsets, eval_fraction=eval_fraction, vocab_size=END + 1, end_of_document=END
    )
    return training


def make_loader(split: Split, **changes: Any) -> Loader:
    names = ("sequence_length", "isolate_documents")
    layout = RowLayout(**{"sequence_length": 5, **{name: changes.pop(name) for name in names if name in changes}})
    return Loader(split, layout=layout, **{"seed": 0, "global_batch": 4, **changes})


def joined(split: Split, position: int, *, dp_degree: int, **changes: Any) -> dict[str, torch.Tensor]:
    shares = [
        make_loader(split, dp_rank=rank, dp_degree=dp_degree, **changes).batch(position) for rank in range(dp_degree)
    ]
    return {name: torch.cat([share[name] for share in shares]) for name in shares[0]}


def positions(loader: Loader) -> Iterator[int]:
    position = 0
    while loader.has_batch(position):
        yield position
        position += loader.global_batch


CASES = {
    "lengths": st.lists(st.integers(2, 40), min_size=4, max_size=30),
    "sequence_length": st.integers(2, 7),
    "seed": st.integers(0, 2**40),
}


@settings(max_examples=60)
@given(
    position=st.integers(0, 10**6),
    quarter=st.integers(1, 4),
    epochs=st.sampled_from([None, 1, 3]),
    isolate=st.booleans(),
    **CASES,
)
def test_shares_of_any_degree_make_the_same_batch(
    lengths: list[int], sequence_length: int, seed: int, isolate: bool, position: int, quarter: int, epochs: int | None
) -> None:
    split = make_split(lengths, eval_fraction=0.1)
    if split.num_rows(sequence_length) == 0:
        return
    settings_of_run = {
        "sequence_length": sequence_length,
        "seed": seed,
        "global_batch": 4 * quarter,
        "isolate_documents": isolate,
        "epochs": epochs,
    }
    total = make_loader(split, **settings_of_run).total_samples
    position = position if total is None else position % total
    whole = make_loader(split, **settings_of_run).batch(position)
    for dp_degree in (2, 4):
        parts = joined(split, position, dp_degree=dp_degree, **settings_of_run)
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


@settings(max_examples=40)
@given(
    done=st.integers(0, 40),
    before=st.sampled_from([2, 4, 8]),
    after=st.sampled_from([2, 4, 8]),
    isolate=st.booleans(),
    **CASES,
)
def test_a_resumed_run_sees_the_samples_it_would_have_seen(
    lengths: list[int], sequence_length: int, seed: int, isolate: bool, done: int, before: int, after: int
) -> None:
    """Batch size and dp degree both change at sample `done * before`; the samples run on as in one big batch."""
    split = make_split(lengths)
    if split.num_rows(sequence_length) == 0:
        return
    run = {"sequence_length": sequence_length, "seed": seed, "isolate_documents": isolate}
    first = joined(split, done * before, dp_degree=1, global_batch=before, **run)
    then = joined(split, (done + 1) * before, dp_degree=2, global_batch=after, **run)
    straight = joined(split, done * before, dp_degree=1, global_batch=before + after, **run)
    for name, rows in straight.items():
        assert torch.equal(torch.cat([first[name], then[name]]), rows)


@settings(max_examples=40)
@given(quarter=st.integers(1, 3), epochs=st.integers(1, 3), **CASES)
def test_finite_data_gives_every_row_once_an_epoch_and_fills_up_with_zero_weight(
    lengths: list[int], sequence_length: int, seed: int, quarter: int, epochs: int
) -> None:
    split = make_split(lengths)
    num_rows = split.num_rows(sequence_length)
    if num_rows == 0:
        return
    run = {"sequence_length": sequence_length, "seed": seed, "global_batch": 4 * quarter, "epochs": epochs}
    loader = make_loader(split, **run)
    batches = [joined(split, position, dp_degree=4, **run) for position in positions(loader)]
    inputs = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    assert loader.total_samples == epochs * num_rows
    assert len(inputs) == len(batches) * 4 * quarter  # every batch is full on every rank
    assert len(inputs) - epochs * num_rows < 4 * quarter  # and none is filler alone
    stream = split.read(np.array([0]), length=split.num_tokens)[0]
    rows = sorted(stream[i * sequence_length :][: sequence_length + 1].tolist() for i in range(num_rows))
    for epoch in range(epochs):
        seen = slice(epoch * num_rows, (epoch + 1) * num_rows)
        assert sorted(torch.cat([inputs[seen], labels[seen, -1:]], dim=1).tolist()) == rows
    filler = slice(epochs * num_rows, None)
    assert (labels[filler] == -100).all()
    assert ((inputs >= 0) & (inputs < split.vocab_size)).all()


def test_labels_are_the_inputs_shifted_by_one() -> None:
    split = make_split([7, 9, 4, 30])
    batch = make_loader(split).batch(0)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 5)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert "position_ids" not in batch


def test_rows_tile_the_stream_and_share_only_the_boundary_token() -> None:
    split = make_split([50])
    loader = make_loader(split, shuffle=False, epochs=1)
    assert loader.num_rows == 9  # (50 - 1) // 5
    batch = loader.batch(0)
    assert batch["input_ids"].flatten().tolist() == list(range(20))
    assert batch["labels"].flatten().tolist() == list(range(1, 21))


def test_without_end_each_epoch_is_a_fresh_order_and_a_batch_may_straddle_two() -> None:
    split = make_split([101])  # 20 rows
    loader = make_loader(split, global_batch=30)
    assert loader.total_samples is None
    assert loader.has_batch(10**12)
    first = loader.batch(0)["input_ids"][:, 0].tolist()
    second = loader.batch(30)["input_ids"][:, 0].tolist()
    samples = first + second
    rows = list(range(0, 100, 5))
    assert sorted(samples[:20]) == sorted(samples[20:40]) == sorted(samples[40:]) == rows
    assert samples[:20] != samples[20:40] != samples[40:]


def test_another_seed_is_another_order() -> None:
    split = make_split([501])
    orders = [make_loader(split, seed=seed, global_batch=100).batch(0)["input_ids"][:, 0].tolist() for seed in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_isolated_documents_restart_positions_and_lose_the_label_across() -> None:
    split = make_split([3, 4, 10])  # 0 1 END | 2 3 4 END | 5 6 7 8 9 10 11 12 13 END
    batch = make_loader(split, sequence_length=8, global_batch=2, isolate_documents=True, shuffle=False).batch(0)
    assert batch["input_ids"].tolist() == [[0, 1, END, 2, 3, 4, END, 5], [6, 7, 8, 9, 10, 11, 12, 13]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch["labels"].tolist() == [[1, END, -100, 3, 4, END, -100, 6], [7, 8, 9, 10, 11, 12, 13, END]]


def test_past_the_end_there_is_no_batch() -> None:
    loader = make_loader(make_split([50]), epochs=1)
    assert [loader.has_batch(position) for position in (-1, 0, 8, 9)] == [False, True, True, False]
    with pytest.raises(IndexError, match="sample 9 of 9"):
        loader.batch(9)


@pytest.mark.parametrize(("global_batch", "nearest"), [(10, "8 or 12"), (3, "4"), (0, "4")])
def test_an_indivisible_batch_names_the_nearest_legal_ones(global_batch: int, nearest: str) -> None:
    with pytest.raises(BatchError, match=f"a global batch of {global_batch} .* 4 data-parallel") as caught:
        make_loader(make_split([50]), global_batch=global_batch, dp_degree=4)
    assert caught.value.hint == f"set train.global_batch to {nearest}"


def test_a_rank_outside_the_degree_is_refused() -> None:
    with pytest.raises(ValueError, match="dp_rank 2"):
        make_loader(make_split([50]), dp_rank=2, dp_degree=2)


def test_too_little_data_says_how_much_is_needed() -> None:
    with pytest.raises(DataError, match=r"5 tokens in 1 documents, .* sequence_length 5 needs 6") as caught:
        make_loader(make_split([5]))
    assert "sequence_length" in caught.value.hint
    assert make_loader(make_split([6])).num_rows == 1
