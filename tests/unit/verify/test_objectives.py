"""Objectives in verify: engine, reference and oracle compute one loss by three codes; pairs, small teachers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weft.core.data_spec import DataSpec
from weft.core.objective_spec import ObjectiveSpec
from weft.core.run_spec import ModelSpec, RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import IGNORED, RowLayout
from weft.data.words import counted_of, tokens_of
from weft.engine.preference import LastTokenRewards, RowLogProbs, objective_of
from weft.models.build import build_config
from weft.verify.borders import Borders
from weft.verify.finite_pairs import FinitePairs
from weft.verify.finite_text import EVAL_FRACTION
from weft.verify.oracle.facts import CorpusFacts, RankShare
from weft.verify.oracle.objectives import REFERENCE
from weft.verify.oracle.objectives import objective_of as formula_of
from weft.verify.oracle.pairs import PairStream, check_pairs_again
from weft.verify.oracle.samples import WrongSampleError, check_epoch
from weft.verify.plain_objectives import plain_loss
from weft.verify.small_teacher import small_config, with_small_teacher, write_teacher

ROWS, LENGTH, WORDS = 8, 12, 20
SPECS: list[dict[str, Any]] = [
    {"kind": "dpo", "beta": 0.7, "label_smoothing": 0.2},
    {"kind": "dpo", "reference": "none", "per_token": True},
    {"kind": "dpo", "loss": "ipo"},
    {"kind": "orpo", "beta": 0.3},
    {"kind": "reward", "center": 0.1},
]


class _Answers(nn.Module):
    """A model that answers with given logits."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, **_: Any) -> Any:
        return SimpleNamespace(logits=self.logits)


def a_batch(width: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    labels = torch.randint(0, WORDS, (ROWS, LENGTH))
    for row in range(ROWS):
        labels[row, : 1 + row % 3], labels[row, 6 + row % 5 :] = IGNORED, IGNORED
    labels[5] = IGNORED  # half of a pair: it does not count
    given = torch.randn(ROWS, dtype=torch.float64)
    batch = {"input_ids": labels.clamp(min=0), "labels": labels, "reference_log_probs": given}
    return torch.randn(ROWS, LENGTH, width), batch


@pytest.mark.parametrize("given", SPECS, ids=lambda given: "-".join(map(str, given.values())))
def test_three_codes_compute_one_loss(given: dict[str, Any]) -> None:
    spec = ObjectiveSpec(**given)
    logits, batch = a_batch(1 if spec.kind == "reward" else WORDS)
    engine: Any = objective_of(spec)
    engine.log_probs = (LastTokenRewards if spec.kind == "reward" else RowLogProbs)(nn.Linear(1, 1), None)
    engine.log_probs._takes_ids_alone = False
    plain = plain_loss(spec, compute=torch.float32, device=torch.device("cpu"))
    formula = formula_of(spec.model_dump())
    rows = {key: value.numpy() for key, value in batch.items()}
    rows[REFERENCE] = rows.pop("reference_log_probs")
    found = [
        float(engine.loss_sum(_Answers(logits), batch)),
        float(plain.loss_sum(_Answers(logits), batch)),
        float(formula.total(logits, rows)),
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)
    assert int(engine.weight(batch)) == plain.count(batch["labels"]) == formula.count(rows["labels"]) == 3


def test_pairs_that_do_not_divide(tmp_path: Path) -> None:
    """The rows that are made by hand are those that the loader reads of the held-out pairs."""
    text = FinitePairs(rows=4, length=16)
    text.write(tmp_path / "pairs")
    data = DataSpec(
        source=str(tmp_path / "pairs"), tokenizer="bytes", format="preference", sequence_length=16,
        eval_fraction=EVAL_FRACTION,
    )  # fmt: skip
    corpus = open_corpus(data)
    assert corpus.evaluation is not None
    layout: Any = {"global_batch": 4, "seed": 0, "layout": RowLayout.of(data), "epochs": 1}
    held_out = Loader(corpus.evaluation, shuffle=False, **layout)
    for index, expected in enumerate(text.evaluation(end_of_document=corpus.end_of_document, has_positions=False)):
        found, count = held_out.batch(4 * index), len(expected["labels"])
        assert torch.equal(found["labels"][:count], expected["labels"])
        assert torch.equal(found["input_ids"][:count], expected["input_ids"])
        assert bool((found["labels"][count:] == IGNORED).all())
    training = Loader(corpus.training, **layout)
    tokens = [int((training.batch(4 * step)["labels"] != IGNORED).sum()) for step in range(len(text.tokens))]
    assert tokens == text.tokens
    assert tokens[-1] < tokens[0]


def pair_stream(folder: Path, change: Any) -> tuple[PairStream, CorpusFacts, dict[str, Any]]:
    FinitePairs(rows=4, length=16).write(folder)
    data = {"source": str(folder / "pairs.jsonl"), "tokenizer": "bytes", "format": "preference", "sequence_length": 16}
    spec = DataSpec.model_validate({**data, "eval_fraction": 0.0})
    corpus = open_corpus(spec)
    words = corpus.training.tokens  # type: ignore[union-attr]

    def batch(position: int, *, dp_rank: int, dp_degree: int) -> Any:
        share: Any = {"dp_rank": dp_rank, "dp_degree": dp_degree, "layout": RowLayout.of(spec)}
        found = Loader(corpus.training, seed=1, global_batch=4, epochs=1, **share).batch(position)
        rows = {key: value.numpy() for key, value in found.items()}
        change(rows)
        return rows

    bounds = corpus.training.bounds  # type: ignore[union-attr]
    share = RankShare(
        ranges=[], num_rows=len(bounds) // 2, batch=batch, documents=[(int(a), int(b)) for a, b in bounds]
    )
    tokens, counted = tokens_of(words, words.dtype), counted_of(words, words.dtype)
    stream = PairStream(
        share=share, tokens=tokens, counted=counted, length=16, end=corpus.end_of_document, truncation="end",
        is_packed=False,
    )  # fmt: skip
    facts = CorpusFacts(
        tokens=tokens, counted=counted, vocab_size=corpus.vocab_size, end_of_document=corpus.end_of_document,
        training=share, held_out=None,
    )  # fmt: skip
    return stream, facts, data


def _answers_swapped(rows: dict[str, Any]) -> None:
    for key, values in rows.items():
        rows[key] = values.reshape(-1, 2, values.shape[1])[:, ::-1].reshape(values.shape).copy()


def _answers_of_other_pairs(rows: dict[str, Any]) -> None:
    for values in rows.values():
        values[1::2] = np.roll(values[1::2], 1, axis=0)


def test_the_oracle_finds_every_pair_once(tmp_path: Path) -> None:
    stream, facts, data = pair_stream(tmp_path, lambda _: None)
    assert "every sample of an epoch once" in check_epoch(stream, rows=4, num_epochs=1, dp_degree=2)
    assert check_pairs_again(data, facts) == f"{2 * stream.num_rows} answers read again"


@pytest.mark.parametrize("bug", [_answers_swapped, _answers_of_other_pairs])
def test_the_oracle_finds_exchanged_answers(bug: Any, tmp_path: Path) -> None:
    stream, _, _ = pair_stream(tmp_path, bug)
    with pytest.raises(WrongSampleError, match="chosen and rejected"):
        check_epoch(stream, rows=4, num_epochs=1, dp_degree=1)


def test_the_oracle_finds_a_corpus_with_exchanged_answers(tmp_path: Path) -> None:
    _, facts, data = pair_stream(tmp_path, lambda _: None)
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    lines[0] = lines[0].replace("chosen", "x").replace("rejected", "chosen").replace('"x"', '"rejected"')
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(WrongSampleError, match="chosen of row 1"):
        check_pairs_again(data, facts)


def test_planted_rows_leave_an_uneven_number_of_pairs() -> None:
    planted = next(Borders(vocab_size=64, num_ranks=2, rows=16, length=16, is_paired=True).training(steps=4))
    whole = (~planted.missing).any(1).view(-1, 2).all(1)
    shares = whole.view(4, 2).sum(1)  # two micro-batches of two ranks
    assert 0 < int(whole.sum()) < 8
    assert len(set(shares.tolist())) > 1


def test_a_small_teacher_keeps_the_vocabulary_and_drops(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8}
    config = build_config(ModelSpec(type="llama", config={**sizes, "vocab_size": 320}), vocab_size=1)
    write_teacher(config, tmp_path / "large")
    small = small_config(str(tmp_path / "large"))
    assert (small.vocab_size, small.num_hidden_layers, small.hidden_size) == (320, 2, 64)
    assert small.attention_dropout > 0
    objective = {"kind": "distillation", "teacher": str(tmp_path / "large")}
    run, changes = with_small_teacher(
        RunSpec.from_tables({"model": {"type": "llama"}, "objective": objective}), tmp_path / "small", is_writer=True
    )
    assert run.objective.teacher == str(tmp_path / "small")
    assert (tmp_path / "small" / "model.safetensors").is_file()
    assert changes
