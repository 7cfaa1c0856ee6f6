"""Evaluation sets by name: the loss of their own rows in every record of the run, and errors that name the set."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import call_weft, metrics, run_tables, train_here, write_run
from transformers import AutoModelForCausalLM

from weft.core.errors import BadValueError, DataError, TokenizerError
from weft.core.run_spec import RunSpec
from weft.report.folder import read_folder
from weft.train.export import export_run
from weft.train.folder.changes import changes_between, require_named
from weft.train.ranks.process import leave

LENGTH = 32
QUICK = {"measure": False, "dry_run": False}


def write_sets(folder: Path) -> list[dict[str, Any]]:
    """Two sets: 11 rows of plain text in two files, and chats in JSONL."""
    (folder / "plain").mkdir()
    for number in range(2):
        (folder / "plain" / f"{number}.txt").write_text("selvage and reed " * 11)
    turns = [{"role": "user", "content": "warp?"}, {"role": "assistant", "content": "weft."}]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(3)))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    return [
        {"name": "plain", "source": str(folder / "plain"), "batches": 100},
        {"name": "one-batch", "source": str(folder / "plain"), "batches": 1},
    ]


def loss_by_hand(folder: Path, text: bytes, num_rows: int) -> float:
    """The mean loss over rows of bytes, each document ended by the end token (256)."""
    tokens = torch.tensor([*text, 256] * 2)
    rows = torch.stack([tokens[at * LENGTH : (at + 1) * LENGTH + 1] for at in range(num_rows)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_each_set_has_the_loss_of_its_own_rows(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = write_sets(tmp_path)
    settings = {"train.steps": 4, "evaluation.every": 2, "data.evaluation": sets, "ledger": QUICK}
    ledger = train_here(tmp_path / "run", corpus, settings)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "evaluations" in line] == [2, 4]
    assert all("eval_loss" in line for line in lines if "evaluations" in line)  # the held-out part goes on
    found = lines[-1]["evaluations"]
    export_run(tmp_path / "run", tmp_path / "exported")
    text = ("selvage and reed " * 11).encode()
    num_rows = (2 * (len(text) + 1) - 1) // LENGTH
    assert num_rows == 11  # two batches of 8, the second filled up
    for name, rows in (("plain", num_rows), ("one-batch", 8)):
        assert found[name]["loss"] == pytest.approx(loss_by_hand(tmp_path / "exported", text, rows), rel=1e-5)
        assert found[name]["perplexity"] == pytest.approx(math.exp(found[name]["loss"]))
        assert found[name]["tokens"] == rows * LENGTH
    assert ledger["run"]["evaluations"] == found
    said = capsys.readouterr().err
    assert f"evaluation at step 4: plain loss {found['plain']['loss']:.4f}, perplexity" in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "figure-evaluations" in page
    assert f"{found['one-batch']['perplexity']:.4g}" in page


def test_a_set_has_a_format_of_its_own(tmp_path: Path, corpus: Path) -> None:
    write_sets(tmp_path)
    chats = {"name": "chats", "source": str(tmp_path / "chats.jsonl"), "format": "chat"}
    data = {**run_tables(corpus)["data"], "evaluation": [chats], "eval_fraction": 0.0}
    with pytest.raises(TokenizerError, match="no chat template"):  # of the set: [data] is plain text
        train_here(tmp_path / "none", corpus, {"train.steps": 2, "data": data})
    leave()
    (tmp_path / "said.jsonl").write_text("".join(json.dumps({"said": "warp and weft " * 9}) + "\n" for _ in range(3)))
    said = {"name": "said", "source": str(tmp_path / "said.jsonl"), "text_field": "said"}
    train_here(tmp_path / "run", corpus, {"train.steps": 2, "data": {**data, "evaluation": [said]}})
    last = metrics(tmp_path / "run")[-1]
    assert "eval_loss" not in last
    assert last["evaluations"]["said"]["tokens"] > 0


def test_old_documents_and_reports_go_on(tmp_path: Path, corpus: Path) -> None:
    train_here(tmp_path / "run", corpus, {"train.steps": 2})
    assert all("evaluations" not in line for line in metrics(tmp_path / "run"))
    assert "figure-evaluations" not in (tmp_path / "run" / "report.html").read_text()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 3, "loss": 1.0, "evaluations": {"odd": 7, "none": {"loss": null}, "good": {"loss": 2.5}}}\n'
        )
    last = read_folder(tmp_path / "run").metrics.steps[-1]
    assert last.evaluations is not None
    assert last.evaluations["good"].loss == 2.5
    assert math.isnan(last.evaluations["odd"].loss)


def test_a_set_without_a_row_is_named(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"the evaluation set 'tiny' has no row: the split has 6 tokens"):
        train_here(
            tmp_path / "run", corpus, {"data.evaluation": [{"name": "tiny", "source": str(tmp_path / "short.txt")}]}
        )


def test_a_missing_file_is_found_before_anything_is_built(tmp_path: Path, corpus: Path) -> None:
    sets = [{"name": "gone", "source": str(tmp_path / "gone.txt")}]
    write_run(tmp_path / "run.toml", corpus, {"data.evaluation": sets})
    code, _, err = call_weft("train", tmp_path / "run.toml", "--out", tmp_path / "run")
    assert code == 2
    assert "gone.txt" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sets", "match"),
    [
        ([{"name": "a", "source": "x"}, {"name": "a", "source": "y"}], r"evaluation\[1\]: the name 'a' is taken"),
        ([{"name": "held-out", "source": "x"}], r"evaluation\[0\]: the name 'held-out' is taken"),
        ([{"name": "a/b", "source": "x"}], "pattern"),
        ([{"name": "a", "source": "x", "format": "preference"}], "not evaluated"),
        ([{"name": "a", "source": "x", "train_on": "all"}], r"evaluation\[0\]: train_on is for format = 'chat'"),
    ],
)
def test_bad_sets_are_refused(sets: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(BadValueError, match=match):
        RunSpec.from_tables({"model": {"type": "llama"}, "data": {"evaluation": sets}})


def test_a_resume_may_add_a_set(tmp_path: Path) -> None:
    tables = RunSpec.default().model_dump(mode="json", exclude_none=True)
    more = {**tables["data"], "evaluation": [{"name": "a", "source": "x"}]}
    [change] = changes_between(RunSpec.default(), RunSpec.from_tables({**tables, "data": more}))
    require_named([change], ())
    assert not change.is_of_training
    assert not change.restarts_data
