"""The oracle's check of samples: healthy rows pass, and every planted bug in data, masks or packing is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.data.loader import Loader
from weft.data.rows import IGNORED, RowLayout
from weft.data.split import Split, split_documents
from weft.data.words import counted_of, to_words, tokens_of
from weft.verify.oracle import streams
from weft.verify.oracle.facts import RankShare
from weft.verify.oracle.samples import SampleStream, WrongSampleError, check_epoch

LENGTH, END, ROWS = 8, 9, 4
Batch = dict[str, Any]


def make_split() -> Split:
    draw = np.random.default_rng(2)
    lengths = draw.integers(3, 13, 14)
    words = []
    for length in lengths:
        counted = draw.random(length) < 0.5
        counted[-1] = True
        words.append(to_words(draw.integers(10, 60, length), counted, vocab_size=64))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return split_documents(
        np.concatenate(words), offsets, eval_fraction=0, vocab_size=64, end_of_document=END, has_mask=True
    )[0]


def stream_of(packing: Any, change: Callable[[Batch], None], *, truncation: Any = "start") -> SampleStream:
    split = make_split()
    layout = RowLayout(sequence_length=LENGTH, packing=packing, truncation=truncation)

    def batch(position: int, *, dp_rank: int, dp_degree: int) -> Batch:
        share: Any = {"dp_rank": dp_rank, "dp_degree": dp_degree}
        balances = packing == "documents"
        loader = Loader(split, seed=1, global_batch=ROWS, layout=layout, epochs=1, balances=balances, **share)
        found = {key: value.numpy() for key, value in loader.batch(position).items()}
        change(found)
        return found

    num_rows = Loader(split, seed=1, global_batch=ROWS, layout=layout).num_rows
    words = split.tokens
    return SampleStream(
        share=RankShare(
            ranges=[], num_rows=num_rows, batch=batch, documents=[(int(a), int(b)) for a, b in split.bounds]
        ),
        tokens=tokens_of(words, words.dtype),
        counted=counted_of(words, words.dtype),
        length=LENGTH,
        end=END,
        truncation=truncation,
        is_packed=packing == "documents",
    )


def check(stream: SampleStream, *, dp_degree: int = 1) -> str:
    return check_epoch(stream, rows=ROWS, num_epochs=1, dp_degree=dp_degree)


@pytest.mark.parametrize("packing", ["none", "documents"])
@pytest.mark.parametrize("truncation", ["start", "end", "drop", "split"])
def test_healthy_rows_pass(packing: str, truncation: str) -> None:
    assert "every sample of an epoch once" in check(
        stream_of(packing, lambda _: None, truncation=truncation), dp_degree=2
    )


def _labels_are_inputs(batch: Batch) -> None:
    counted = batch["labels"] != IGNORED
    batch["labels"][counted] = batch["input_ids"][counted]


def _everything_counts(batch: Batch) -> None:
    batch["labels"][:, :-1] = batch["input_ids"][:, 1:]


def _a_mask_a_token_late(batch: Batch) -> None:
    counted = np.roll(batch["labels"] != IGNORED, 1, axis=1)
    following = np.concatenate([batch["input_ids"][:, 1:], batch["input_ids"][:, :1]], axis=1)
    batch["labels"][:] = np.where(counted, following, IGNORED)


def _padding_counts(batch: Batch) -> None:
    batch["labels"][:, -1] = np.where(batch["labels"][:, -1] == IGNORED, END, batch["labels"][:, -1])


def _first_row_again(batch: Batch) -> None:
    for values in batch.values():
        values[-1] = values[0]


def _positions_run_through(batch: Batch) -> None:
    batch["position_ids"][:] = np.arange(LENGTH)


def _a_label_across_a_border(batch: Batch) -> None:
    begins = np.argwhere(batch["position_ids"][:, 1:] == 0)
    for row, column in begins:
        batch["labels"][row, column] = batch["input_ids"][row, column + 1]


EVERYWHERE = (_labels_are_inputs, _everything_counts, _a_mask_a_token_late, _padding_counts, _first_row_again)


@pytest.mark.parametrize(
    ("packing", "bug"),
    [
        *(("none", bug) for bug in EVERYWHERE),
        *(("documents", bug) for bug in (*EVERYWHERE, _positions_run_through, _a_label_across_a_border)),
    ],
)
def test_planted_bugs_are_caught(packing: str, bug: Callable[[Batch], None]) -> None:
    with pytest.raises(WrongSampleError):
        check(stream_of(packing, bug))


def test_ranks_that_read_other_rows_are_caught() -> None:
    stream = stream_of("none", lambda _: None)
    one = stream.share.batch
    shares = RankShare(
        ranges=[],
        num_rows=stream.num_rows,
        batch=lambda position, *, dp_rank, dp_degree: one(position, dp_rank=0, dp_degree=dp_degree),
        documents=stream.share.documents,
    )
    wrong = SampleStream(**{**vars(stream), "share": shares})
    with pytest.raises(WrongSampleError, match="over ranks"):
        check(wrong, dp_degree=2)


@pytest.mark.parametrize("bug", [None, _labels_are_inputs, _first_row_again], ids=["none", "labels", "a row twice"])
def test_windows_of_a_long_epoch(bug: Callable[[Batch], None] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_ROWS", 8)
    monkeypatch.setattr(streams, "NUM_WINDOWS", 2)
    stream = stream_of("none", bug or (lambda _: None))
    assert stream.num_rows > 8
    if bug is None:
        assert check(stream, dp_degree=2).startswith("no sample of an epoch too often: 10 in 10 of ")
        return
    with pytest.raises(WrongSampleError):
        check(stream)


def test_windows_are_global_batches_whose_rows_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_ROWS", 6)
    monkeypatch.setattr(streams, "NUM_WINDOWS", 2)
    stream = stream_of("documents", lambda _: None)
    assert list(streams.windows(103, rows=ROWS)) == [(0, 4), (96, 103)]
    assert stream.num_rows > 6
    assert "too often" in check(stream, dp_degree=2)


def test_samples_are_those_of_whole_batches_in_any_order() -> None:
    stream = stream_of("documents", lambda _: None)
    found = stream.batch_at(range(6))["input_ids"].tolist()
    assert found[:4] == stream.share.batch(0, dp_rank=0, dp_degree=1)["input_ids"].tolist()
    assert len({tuple(row) for row in found}) == len(found) == 6
