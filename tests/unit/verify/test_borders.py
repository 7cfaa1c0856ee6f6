"""Batches that reach the borders: slice ends as inputs and labels, labels missing at edges, the same on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from verify_ranks import small_run

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.borders import IGNORED, Batch, Borders, check_reach, plan_ends, slice_ends
from weft.verify.exercise import Subject, evaluation_batches, training_batches
from weft.verify.finite_text import EVAL_FRACTION, FiniteText

SMALL = Borders(vocab_size=257, num_ranks=4, rows=8, length=16)
STEPS = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for index in range(6):
        (folder / f"{index}.txt").write_text(f"{'plain text ' * 40}{index}\n" * 4, encoding="utf-8")
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def subject_of(corpus: str, *, num_ranks: int = 4, **given: Any) -> Subject:
    return Subject.open(RunSpec.from_tables(small_run(corpus, **given)), num_ranks=num_ranks)


def reached(batches: list[Batch], key: str) -> set[int]:
    return {token for batch in batches for token in batch[key].unique().tolist()} - {IGNORED}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, {0, 256}),
        ({"mesh": {"tp": 2}}, {0, 128, 129, 256}),
        ({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}, {0, 128, 129, 256}),
        # slices of 129 and 128 rows, sharded by 65 and 64
        ({"mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}, {0, 64, 65, 128, 129, 192, 193, 256}),
        ({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}, {0, 128, 129, 256}),
        ({"mesh": {"tp": 8}, "tensor_parallel": {"mode": "2.5d"}}, {0, 128, 129, 256}),
        # tables in quarters of 65, logits in halves made of two of them
        ({"mesh": {"tp": 8}, "tensor_parallel": {"mode": "3d"}}, {0, 64, 65, 128, 129, 130, 194, 195, 256}),
    ],
)
def test_the_ends_of_a_plan(tables: dict[str, Any], expected: set[int]) -> None:
    assert plan_ends(Plan.from_tables(tables), 257) == expected


def test_more_ranks_than_rows_leave_no_empty_slices() -> None:
    assert slice_ends(3, outer=8) == [0, 1, 2]


@pytest.mark.parametrize("model", ["llama", "llama-odd", "gpt2"])
def test_every_row_is_an_input_and_a_label_and_all_ends_are_trained_on(corpus: str, model: str) -> None:
    subject = subject_of(corpus, model=model)
    batches = training_batches(subject, steps=5)  # what `weft verify` takes by itself
    everything = set(range(subject.borders.vocab_size))
    for key in ("input_ids", "labels"):
        assert reached(evaluation_batches(subject), key) == everything
        for step in (0, 2, 3):  # the others lose labels of half a batch, or of a tail
            assert set(subject.borders.ends) <= reached([batches[step]], key)


def test_ids_that_no_text_has_are_planted_up_to_the_models_own_vocabulary(corpus: str) -> None:
    assert subject_of(corpus, model="llama-odd").borders.vocab_size == 259


@pytest.mark.parametrize("isolate", [False, True])
def test_ranks_plant_what_one_process_plants(corpus: str, isolate: bool) -> None:
    subject = subject_of(corpus, data={"isolate_documents": isolate})
    for made in (lambda **share: training_batches(subject, steps=STEPS, **share),
                 lambda **share: evaluation_batches(subject, **share)):  # fmt: skip
        whole, shares = made(), [made(dp_rank=rank, dp_degree=4) for rank in range(4)]
        for step, batch in enumerate(whole):
            for key, values in batch.items():
                assert torch.equal(values, torch.cat([share[step][key] for share in shares]))


def test_labels_are_still_the_next_tokens_and_text_is_left_in_every_row(corpus: str) -> None:
    subject = subject_of(corpus)
    plain = [subject.loader().batch(step * 8) for step in range(STEPS)]
    for before, batch in zip(plain, training_batches(subject, steps=STEPS), strict=True):
        following = batch["labels"][:, :-1]
        assert torch.where(following == IGNORED, True, following == batch["input_ids"][:, 1:]).all()
        assert torch.equal(batch["input_ids"][:, ::8], before["input_ids"][:, ::8])


def test_labels_are_missing_at_every_edge_and_whole_micro_batches_have_none(corpus: str) -> None:
    labels = [batch["labels"] == IGNORED for batch in training_batches(subject_of(corpus), steps=STEPS)]
    partly = torch.cat([rows[~rows.all(dim=1)] for rows in labels])
    for edge in (0, 15, 3, 4, 7, 8, 11, 12):  # of the row, and of two and four shards of it
        assert partly[:, edge].any()
        assert not partly[:, edge].all()
    assert labels[1][:4].all()  # rank 0 of two, or the first of two micro-batches
    assert not labels[1][4:].all()
    assert labels[-1][6:].all()  # a final partial batch
    assert not labels[-1][:6].all()
    assert not labels[0].all(dim=1).any()  # gradients are judged in the first step: every row has some


@pytest.mark.parametrize(("rows", "length"), [(8, 32), (8, 16), (1, 4), (2, 3), (6, 100)])
def test_one_over_the_labels_of_the_first_step_is_far_from_any_bfloat16(rows: int, length: int) -> None:
    planted = next(replace(SMALL, rows=rows, length=length).training(steps=STEPS))
    count = int((~planted.missing).sum())
    assert count >= rows * length // 4
    scale = torch.tensor(1 / count, dtype=torch.float64)
    assert abs(scale.bfloat16().double() / scale - 1) > 2e-3 or rows * length < 16


def test_documents_end_in_the_first_the_middle_and_the_last_column(corpus: str) -> None:
    batch = training_batches(subject_of(corpus, data={"isolate_documents": True}), steps=STEPS)[0]
    row = 4
    assert (batch["input_ids"][row] == 256).nonzero().squeeze(1).tolist() == [0, 8, 15]
    assert batch["position_ids"][row].tolist() == [0, *range(8), *range(7)]
    assert (batch["labels"][row][[0, 8, 15]] == IGNORED).all()
    assert batch["labels"][row][7] == 256  # the end of a document is a label itself


def test_a_batch_without_room_says_what_it_reached() -> None:
    narrow = replace(SMALL, rows=1, length=4, num_ranks=16, vocab_size=50_000)
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, 4, dtype=torch.int64)}
    check = check_reach(narrow, Plan(), [batch], [])
    assert check.ok
    assert "1 of 50000 vocabulary rows as inputs and as labels" in check.detail
    assert "1 of 2 ends" in check.detail


def test_a_missed_end_is_an_alarm() -> None:
    text = torch.arange(97, 113).repeat(8, 1)
    plan = Plan.from_tables({"mesh": {"tp": 2}})
    check = check_reach(SMALL, plan, [{"input_ids": text, "labels": text + 1}] * STEPS, [])
    assert not check.ok
    assert "[0, 128, 129, 256]" in check.detail


@pytest.mark.parametrize(("rows", "length", "isolate"), [(8, 16, False), (1, 8, False), (6, 5, True)])
def test_held_out_rows_of_the_finite_text_are_the_loaders(
    tmp_path: Path, rows: int, length: int, isolate: bool
) -> None:
    text = FiniteText(rows=rows, length=length)
    text.write(tmp_path)
    data = {"source": str(tmp_path), "epochs": 1, "eval_fraction": EVAL_FRACTION, "sequence_length": length}
    run = small_run("", data={**data, "isolate_documents": isolate}, train={"global_batch": rows})
    subject = Subject.open(RunSpec.from_tables(run))
    loader = subject.loader(evaluation=True)
    made = text.evaluation(end_of_document=subject.corpus.end_of_document, has_positions=isolate)
    assert loader.num_rows == subject.loader().num_rows == rows + text.tail
    for index, batch in enumerate(made):
        loaded = loader.batch(index * rows)
        counts = (loaded["labels"] != IGNORED).any(dim=1)
        assert set(loaded) == set(batch)
        for key, values in batch.items():
            assert torch.equal(loaded[key][counts], values)
