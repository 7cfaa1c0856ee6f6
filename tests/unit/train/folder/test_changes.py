"""A resume that changes the run: said or refused, recorded, and never compared with what it is not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tiny_run import call_weft, metrics, train_here, write_corpus

from weft.checkpoint import peek_newest
from weft.core.errors import RunChangedError
from weft.core.run_spec import DEFAULT_RUN, RunSpec
from weft.report.curves import draw_loss
from weft.report.folder import read_folder
from weft.report.training.facts import gather_facts
from weft.train.folder.changes import RunChange, changes_between, keys_of, recorded_run, require_named
from weft.train.folder.history import RunHistory
from weft.train.ranks.process import leave


def run_with(**sections: dict[str, Any]) -> RunSpec:
    tables = {name: dict(section) for name, section in DEFAULT_RUN.items()}
    for name, values in sections.items():
        tables[name] = {**tables.get(name, {}), **values}
    return RunSpec.from_tables(tables)


GUARDED: dict[str, dict[str, Any]] = {
    "data.source": {"data": {"source": "other.txt"}},
    "data.tokenizer": {"data": {"tokenizer": "other"}},
    "data.sequence_length": {"data": {"sequence_length": 128}},
    "data.eval_fraction": {"data": {"eval_fraction": 0.5}},
    "data.epochs": {"data": {"epochs": 2}},
    "train.seed": {"train": {"seed": 5}},
    "train.global_batch": {"train": {"global_batch": 16}},
    "train.optimizer": {"train": {"optimizer": "adam"}},
    "train.frozen": {"train": {"frozen": ["*"]}},
    "model.config.rope_theta": {"model": {"config": {**DEFAULT_RUN["model"]["config"], "rope_theta": 5.0}}},
    "model.attention": {"model": {"attention": "eager"}},
    "evaluation.batches": {"evaluation": {"batches": 9}},
}
FREE: dict[str, dict[str, Any]] = {
    "train.steps": {"train": {"steps": 15}},
    "train.learning_rate": {"train": {"learning_rate": 0.5}},
    "checkpoint.every": {"checkpoint": {"every": 3}},
    "logging.every": {"logging": {"every": 3}},
    "ledger.measure": {"ledger": {"measure": False}},
}


@pytest.mark.parametrize("key", [*GUARDED, *FREE])
def test_each_change_is_found_and_what_is_trained_must_be_named(key: str) -> None:
    [change] = changes_between(RunSpec.default(), run_with(**{**GUARDED, **FREE}[key]))
    assert change.key == key
    if key in FREE:
        require_named([change], ())
        return
    with pytest.raises(RunChangedError) as caught:
        require_named([change], ("train.steps", "logging"))
    assert str(change) in caught.value.message
    assert f"--set {key}=" in caught.value.hint
    for said in (key, key.rpartition(".")[0], f"{key}.deeper"):
        require_named([change], (said,))
    require_named([change], (), earlier=[change])  # an earlier resume said so
    with pytest.raises(RunChangedError):
        require_named([change], (), earlier=[RunChange(key=key, old=0, new="another value")])


def test_a_value_that_comes_or_goes_is_a_change() -> None:
    [change] = changes_between(run_with(data={"epochs": 2}), RunSpec.default())
    assert str(change) == "data.epochs: 2 -> nothing"
    assert keys_of(["data.source=a=b", " train.steps = 3"]) == ("data.source", "train.steps")


def test_a_checkpoint_of_before_has_no_run_and_one_of_after_may_have_other_keys() -> None:
    run = RunSpec.default()
    assert recorded_run({}, otherwise=run) is run
    assert recorded_run({"run": {"future": {}}}, otherwise=run) is run
    other = run_with(train={"seed": 5})
    assert recorded_run({"run": other.model_dump(mode="json")}, otherwise=run) == other


def samples(run: Path) -> int:
    newest = peek_newest(run / "checkpoints")
    assert newest is not None
    return int(newest.meta["samples"])


def test_other_data_are_refused_recorded_and_not_compared(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, first = tmp_path / "run", {"train.steps": 4, "evaluation.every": 2, "logging.tensorboard": False}
    train_here(run, corpus, first)
    before = (run / "run.toml").read_text()
    with pytest.raises(RunChangedError, match=r"train\.seed: 3 -> 9"):
        train_here(run, corpus, {**first, "train.seed": 9}, resume=True)
    leave()
    edited = before.replace("seed = 3", "seed = 9").replace("sequence_length = 32", "sequence_length = 16")
    (run / "run.toml").write_text(edited)  # by hand: no --set says so
    code, _, err = call_weft("train", "--resume", run, "--set", "train.steps=5")
    assert code == 2
    assert "error [W503]: " in err
    assert "data.sequence_length: 32 -> 16; train.seed: 3 -> 9" in err
    assert "--set data.sequence_length=... --set train.seed=..." in err
    leave()
    assert (run / "run.toml").read_text() == edited
    assert not (run / "history").exists()

    other = write_corpus(tmp_path / "others", num_documents=30)
    second = {**first, "data.sequence_length": 16, "train.steps": 8}
    ledger = train_here(run, other, second, resume=True, may_change=("data", "train.steps"))
    said = capsys.readouterr().err
    assert f"changed: data.source: {corpus} -> {other}" in said
    assert "changed: train.steps: 4 -> 8" in said
    assert "the data restarts" in said
    assert samples(run) == 4 * 8  # of the new data, from their first row
    assert RunSpec.from_file(run / "history" / "run-00000000.toml") == RunSpec.from_tables(tomllib.loads(before))
    lines = metrics(run)
    assert [line["step"] for line in lines if "changed" in line] == [5]
    assert set(lines[4]["changed"]) == {"data.source", "data.sequence_length", "train.steps"}
    assert (ledger["run"]["first_loss"], ledger["run"]["eval_loss"]) == (lines[4]["loss"], lines[-1]["eval_loss"])
    assert ledger["run"]["changes"][0]["step"] == 4
    require_report_cut(run, lines)

    capsys.readouterr()
    train_here(run, other, {**second, "train.steps": 9}, resume=True)  # nothing to say again
    assert "changed: train.steps: 8 -> 9" in capsys.readouterr().err
    assert samples(run) == 5 * 8
    assert sorted(path.name for path in (run / "history").iterdir()) == [
        "changes.json",
        "run-00000000.toml",
        "run-00000004.toml",
    ]

    (other / "more.txt").write_text("another document that was not there before " * 20)
    with pytest.raises(RunChangedError, match=r"data\.source: .*\(\d+ documents, .* -> .*\(\d+ documents"):
        train_here(run, other, {**second, "train.steps": 10}, resume=True)


def require_report_cut(run: Path, lines: list[dict[str, Any]]) -> None:
    folder = read_folder(run)
    chart = draw_loss(folder.metrics.steps, resumed=[4], changes=folder.changes)
    assert chart is not None
    curves = [trace["x"] for trace in chart.figure.data if trace["name"] == "evaluation"]
    assert curves == [[2, 4], [6, 8]]
    notes = [annotation["text"] for annotation in chart.figure.layout["annotations"]]
    assert notes == ["changed: data.source, data.sequence_length, train.steps"]
    best = min((lines[5]["eval_loss"], 6), (lines[7]["eval_loss"], 8))
    assert f"best {best[0]:.4g} at step {best[1]}" in chart.caption
    assert "before step 5 belong to other data" in chart.caption
    assert gather_facts(folder).first_loss == pytest.approx(lines[4]["loss"])
    assert any("Changed after step 4: " in remark for remark in folder.remarks)


def test_another_batch_goes_on_at_the_same_sample(tmp_path: Path, corpus: Path) -> None:
    run, first = tmp_path / "run", {"train.steps": 2, "evaluation.every": 0, "logging.tensorboard": False}
    train_here(run, corpus, first)
    train_here(
        run,
        corpus,
        {**first, "train.steps": 4, "train.global_batch": 4},
        resume=True,
        may_change=("train.global_batch",),
    )
    assert samples(run) == 2 * 8 + 2 * 4


def test_a_change_that_is_run_again_from_before_it_is_no_longer_recorded(tmp_path: Path) -> None:
    history, run = RunHistory(tmp_path), RunSpec.default()
    seed, source = RunChange(key="train.seed", old=0, new=1), RunChange(key="data.source", old="a", new="b")
    history.record(4, run, [seed])
    history.record(8, run, [source])
    assert [entry["step"] for entry in history.read()] == [4, 8]
    history.record(8, run, [source])  # killed before its first checkpoint, and gone on with
    assert [entry["step"] for entry in history.read()] == [4, 8]
    history.record(6, run, [])  # from an older checkpoint, with the run of then
    assert [entry["step"] for entry in history.read()] == [4]
    assert history.asked_for() == [seed]
    (tmp_path / "history" / "changes.json").write_text(json.dumps({"torn": 1}))
    assert history.read() == []
