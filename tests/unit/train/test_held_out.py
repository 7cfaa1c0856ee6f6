"""Evaluation never vanishes without a word: one row is enough, none is an error or a warning that stays on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import metrics, train_here
from transformers import AutoModelForCausalLM

from weft.core.errors import DataError
from weft.core.run_spec import RunSpec
from weft.data import Loader, open_corpus
from weft.data.rows import RowLayout
from weft.train.export import export_run
from weft.train.held_out import why_no_evaluation

SHORT = {"train.steps": 2, "train.global_batch": 4, "logging.tensorboard": False}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def documents(folder: Path, *sizes: int) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / f"{number}.txt").write_text("warp and weft " * (size // 14) + "x" * (size % 14))
    return folder


def why(source: Path, *, every: int | None = None, **data: Any) -> str:
    evaluation = {} if every is None else {"every": every}
    run = RunSpec.from_tables(
        {
            "model": {"type": "llama"},
            "data": {"source": str(source), "sequence_length": 64, **data},
            "evaluation": evaluation,
        }
    )
    return why_no_evaluation(run, open_corpus(run.data))


def test_one_row_is_enough(tmp_path: Path) -> None:
    assert why(documents(tmp_path / "texts", *[70] * 3), every=1) == ""


def test_too_few_rows_are_a_warning_and_an_error_where_they_were_asked_for(tmp_path: Path) -> None:
    source = documents(tmp_path / "texts", *[40] * 9)
    found = why(source, eval_fraction=0.01)
    assert "0 rows are held out: 41 tokens in 1 of 9 documents" in found
    assert all(key in found for key in ("data.sequence_length = 64", "data.eval_fraction", "evaluation.every = 0"))
    with pytest.raises(DataError, match=r"evaluation.every = 5 asks for held-out rows: 0 rows are held out") as caught:
        why(source, every=5, eval_fraction=0.01)
    assert "data.eval_fraction" in caught.value.hint
    assert why(source, every=0, eval_fraction=0.01) == ""
    assert why(source, every=5, sequence_length=4000) == ""  # training has no row either: that is the error to report


def test_a_single_document_and_nothing_to_hold_out(tmp_path: Path) -> None:
    source = documents(tmp_path / "texts", 400)
    assert "single document" in why(source)
    assert why(source, eval_fraction=0) == ""
    assert "data.eval_fraction = 0" in why(source, eval_fraction=0, every=5)


def test_the_warning_is_said_at_the_start_and_at_the_end_and_stays_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SHORT, "evaluation": {}}
    ledger = train_here(tmp_path / "run", documents(tmp_path / "texts", 2000), settings)
    assert "single document" in ledger["run"]["no_evaluation"]
    assert any("single document" in note for note in ledger["model"]["notes"])
    said = capsys.readouterr().err
    assert said.index("note: no held-out loss") < said.index("step 1/2") < said.index("warning: no held-out loss")
    assert "single document" in (tmp_path / "run" / "report.html").read_text()
    assert "every" not in (tmp_path / "run" / "run.toml").read_text().partition("[evaluation]")[2].partition("[")[0]


def test_a_batch_of_one_held_out_row_is_that_rows_loss(tmp_path: Path) -> None:
    source = documents(tmp_path / "texts", *[60] * 12)
    settings = {**SHORT, "data.eval_fraction": 0.01, "evaluation": {"every": 2, "batches": 3}}
    train_here(tmp_path / "run", source, settings)
    run = RunSpec.from_file(tmp_path / "run" / "run.toml")
    held_out = open_corpus(run.data).evaluation
    assert held_out is not None
    assert held_out.num_rows(32) == 1
    row = Loader(held_out, seed=0, global_batch=1, layout=RowLayout(sequence_length=32), epochs=1, shuffle=False).batch(
        0
    )
    export_run(tmp_path / "run", tmp_path / "exported")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(row["input_ids"]).logits
    expected = torch.nn.functional.cross_entropy(logits[0], row["labels"][0])
    assert metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["run"]["no_evaluation"] is None
