"""Runs on chats: the row that is shown, losses per document in packed rows, the export with its template, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chats import make_chat_tokenizer, make_chats, template
from tiny_run import call_weft, curve, metrics, rewind, run_tables, train_here, write_run
from tolerances import SAME_STEP_REL
from transformers import AutoModelForCausalLM, AutoTokenizer

from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout, SampleRows
from weft.data.streaming import StreamingLoader
from weft.models.build import build_config
from weft.train.export import export_run

CHATS = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("tokenizer"), "chatml", has_marks=True)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in make_chats(CHATS)))
    return path


def settings(tokenizer: Path, **keys: Any) -> dict[str, Any]:
    data = {"format": "chat", "tokenizer": str(tokenizer), "sequence_length": 96, "truncation": "drop", **keys}
    return {
        **{f"data.{key}": value for key, value in data.items()},
        "train.steps": 2,
        "train.global_batch": 4,
        "evaluation.every": 0,
        "checkpoint": {"every": 0, "at_end": True},
    }


@pytest.mark.parametrize("packing", ["none", "documents"])
def test_gradients_of_a_packed_row_are_those_of_its_samples_alone(packing: str, tokenizer: Path, rows: Path) -> None:
    """Summed losses, as the engine sums them: one forward per sample against one forward of all rows."""
    run = RunSpec.from_tables(run_tables(rows, settings(tokenizer, packing=packing, eval_fraction=0.0)))
    corpus = open_corpus(run.data)
    loader = Loader(corpus.training, seed=0, global_batch=1, layout=RowLayout.of(run.data), epochs=1)
    config = build_config(run.model, vocab_size=corpus.vocab_size, end_of_document=corpus.end_of_document)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    batches = [loader.batch(position) for position in range(loader.num_rows)]
    whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    together = gradients(model, [whole])
    assert isinstance(loader.rows, SampleRows)
    alone = gradients(model, [_alone(loader.rows, index) for index in range(len(loader.rows.pieces.begins))])
    assert loader.num_rows == len(loader.rows.pieces.begins) or packing == "documents"
    assert together.keys() == alone.keys()
    for name, value in together.items():
        torch.testing.assert_close(value, alone[name], rtol=1e-9, atol=1e-12)


def gradients(model: Any, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = model(**inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum").backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def _alone(rows: SampleRows, index: int) -> dict[str, torch.Tensor]:
    """One sample without padding, from the stored words."""
    from weft.data.words import counted_of, tokens_of

    words = rows.split.tokens[rows.pieces.begins[index] : rows.pieces.ends[index]]
    tokens = torch.from_numpy(tokens_of(words, words.dtype))
    labels = tokens.masked_fill(~torch.from_numpy(counted_of(words, words.dtype)), -100)
    return {"input_ids": tokens[None, :-1], "labels": labels[None, 1:]}


def test_a_run_shows_its_row_and_exports_its_template(
    tokenizer: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", rows, settings(tokenizer, truncation="end", sequence_length=40))
    shown = " ".join(capsys.readouterr().err.split())
    assert "are longer than 40 tokens: their end is cut off (data.truncation = 'end')" in shown
    assert "tokens that count:" in shown
    saved = (tmp_path / "run" / "sample.txt").read_text()
    assert "<|im_start|>assistant\n[[" in saved
    assert " ".join(saved.split("\n\n", 1)[1].split()) in shown
    export_run(tmp_path / "run", tmp_path / "out")
    own = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert own.get_chat_template() == template("chatml", has_marks=True)
    again = run_tables(rows, settings(tokenizer))
    del again["data"]["tokenizer"]
    again["model"] = {"path": str(tmp_path / "out")}
    assert open_corpus(RunSpec.from_tables(again).data).vocab_size == len(own)


def test_a_template_by_key_is_exported(rows: Path, tmp_path: Path) -> None:
    """Bytes have no template of their own; the export has it, and is a whole model folder of another run."""
    given = tmp_path / "given.jinja"
    given.write_text(template("chatml", has_marks=False))
    change = settings(Path("bytes"), chat_template=str(given), truncation="end")
    train_here(tmp_path / "run", rows, change)
    export_run(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_chat_template() == given.read_text()
    change = {**settings(Path("bytes"), truncation="end"), "model": {"path": str(tmp_path / "out")}}
    del change["data.tokenizer"]
    tables = run_tables(rows, change)
    tables["data"].pop("tokenizer")
    run = RunSpec.from_tables(tables)
    train_here_again = open_corpus(run.data)
    assert train_here_again.training.has_mask


def test_the_loss_is_over_the_tokens_that_count(tokenizer: Path, rows: Path, tmp_path: Path) -> None:
    """One step over all rows: the same mean whatever the packing."""
    losses, counts = [], []
    for packing in ("none", "documents"):
        keys = settings(tokenizer, packing=packing, eval_fraction=0.0, epochs=1)
        train_here(tmp_path / packing, rows, {**keys, "train.steps": 1, "train.global_batch": 32})
        losses.append(metrics(tmp_path / packing)[0]["loss"])
        counts.append(metrics(tmp_path / packing)[0]["tokens"])
    assert losses[0] == pytest.approx(losses[1], rel=SAME_STEP_REL)
    assert counts[0] == counts[1]


def test_a_streamed_run_resumes_with_the_bits_of_the_uninterrupted_one(
    tokenizer: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = settings(
        tokenizer, streaming=True, shuffle_window=7, packing="documents", truncation="end", eval_fraction=0.0
    )
    keys |= {"train.steps": 6, "checkpoint": {"every": 1, "keep": 10}}
    train_here(tmp_path / "run", rows, keys)
    rewind(tmp_path / "run", tmp_path / "again", step=4)
    opened: list[int] = []
    original = StreamingLoader._open
    monkeypatch.setattr(
        StreamingLoader, "_open", lambda self, number, *rest: opened.append(number) or original(self, number, *rest)
    )
    train_here(tmp_path / "again", rows, keys, resume=True)
    assert curve(tmp_path / "again") == curve(tmp_path / "run")
    assert min(opened[1:]) > 1  # the loader is made at the first window, and continues where the run was


def test_next_tokens_of_pairs_are_refused_by_name(tokenizer: Path, rows: Path, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.toml", rows, {"data.format": "preference", "data.tokenizer": str(tokenizer)})
    code, _, err = call_weft("train", path, "--out", tmp_path / "run")
    assert code == 2
    assert "W204" in err
    assert "'next_token' does not train on pairs" in " ".join(err.split())
    assert not (tmp_path / "run").exists()
