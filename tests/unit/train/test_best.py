"""The best checkpoint is kept beside the newest, and a run without improvement ends, also over a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from planted import scripted_losses
from tiny_run import call_weft, checkpoint_steps, metrics, run_tables, stop_after, train_here, write_run

from weft.checkpoint.layout import read_best
from weft.core.errors import BadValueError, CheckpointError, DataError
from weft.core.run_spec import RunSpec
from weft.train.best import BestEvaluation
from weft.train.parts import TrainParts
from weft.train.ranks.process import leave
from weft.train.trained_tensors import best_step_of

WATCHED = {
    "train.steps": 20,
    "train.stop_after_evaluations": 3,
    "evaluation": {"every": 1, "batches": 1},
    "checkpoint": {"every": 2, "keep": 1, "keep_best": "held-out"},
    "logging.tensorboard": False,
    "ledger": {"measure": False, "dry_run": False},
}
LOSSES = {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.5, 5: math.nan}  # later ones: 3.2


def test_the_best_is_kept_and_the_run_ends(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run.toml", corpus, WATCHED)
    run = tmp_path / "run"
    with scripted_losses(LOSSES, otherwise=3.2):
        code, _, err = call_weft("train", tmp_path / "run.toml", "--out", run)
    assert code == 0
    assert (
        "the run ends after step 6: held-out did not improve in 3 evaluations; the best loss is 3.0000 at step 3" in err
    )
    assert "finished at step 6" in err
    assert len(metrics(run)) == 6
    assert checkpoint_steps(run) == [3, 6]  # of 2, 3, 4, 6: the newest, and the best
    best = {"step": 3, "set": "held-out", "loss": 3.0}
    assert json.loads((run / "checkpoints" / "best.json").read_text()) == best
    facts = json.loads((run / "ledger.json").read_text())["run"]
    assert (facts["status"], facts["best"]) == ("finished", best)
    page = (run / "report.html").read_text()
    assert facts["ended"] in page
    assert "Best evaluation: held-out 3.0000 at step 3." in page

    code, out, _ = call_weft("export", run, "--best", "--out", tmp_path / "best", "--json")
    assert (code, json.loads(out)["step"]) == (0, 3)
    assert call_weft("export", run, "--best", "--step", "3", "--out", tmp_path / "no")[0] == 2

    code, _, err = call_weft("train", tmp_path / "run.toml", "--out", run, "--continue")
    assert code == 0
    assert "has ended: held-out did not improve" in err
    with scripted_losses(LOSSES, otherwise=3.2):  # a resume remembers the count
        code, _, err = call_weft("train", "--resume", run)
        assert code == 0
        assert "the run ends after step 6" in err
        leave()
        code, _, err = call_weft("train", "--resume", run, "--set", "train.stop_after_evaluations=5")
    assert "the run ends after step 8" in err
    assert checkpoint_steps(run) == [3, 8]


def test_a_stopped_run_goes_on_counting(tmp_path: Path, corpus: Path) -> None:
    with scripted_losses(LOSSES, otherwise=3.2), stop_after(5):
        train_here(tmp_path / "run", corpus, WATCHED)
    leave()
    assert checkpoint_steps(tmp_path / "run") == [3, 5]
    with scripted_losses(LOSSES, otherwise=3.2):
        ledger = train_here(tmp_path / "run", corpus, WATCHED, resume=True)
    assert ledger["run"]["steps"] == 6
    assert ledger["run"]["best"] == {"step": 3, "set": "held-out", "loss": 3.0}


def test_the_last_step_may_be_the_best(tmp_path: Path, corpus: Path) -> None:
    settings = {**WATCHED, "train.steps": 3, "checkpoint": {"every": 1, "keep": 1, "keep_best": "held-out"}}
    with scripted_losses(LOSSES, otherwise=3.2):
        ledger = train_here(tmp_path / "run", corpus, settings)
    assert checkpoint_steps(tmp_path / "run") == [3]
    assert best_step_of(tmp_path / "run") == 3
    assert ledger["run"]["ended"] is None
    (tmp_path / "run" / "checkpoints" / "step-00000003").rename(tmp_path / "gone")
    assert read_best(tmp_path / "run" / "checkpoints") is None
    with pytest.raises(CheckpointError, match="no best checkpoint"):
        best_step_of(tmp_path / "run")


def test_improvements_are_counted_from_the_last_one() -> None:
    best = BestEvaluation("a", stop_after=2, delta=0.1)
    assert [best.see(step, {"a": loss, "b": 0.0}) for step, loss in enumerate([3.0, 2.95, 2.91], 1)] == [True] * 3
    assert best.ending == "a did not improve by 0.1 in 2 evaluations; the best loss is 2.9100 at step 3"
    best = BestEvaluation("a", stop_after=2, delta=0.1)
    assert best.see(1, {"a": 3.0})
    assert best.see(2, {"a": 2.95})
    assert best.see(3, {"a": 2.9})  # 0.1 below the reference, which is the first
    assert (best.num_without, best.ending) == (0, "")
    assert not best.see(4, {"b": 1.0})  # another set
    other = BestEvaluation("a", stop_after=2, delta=0.1)
    other.restore(json.loads(json.dumps(best.state(), allow_nan=False)))
    assert other == best
    fresh = BestEvaluation("b")
    fresh.restore(best.state())
    assert fresh == BestEvaluation("b")


def test_no_finite_loss_ends_a_run_too() -> None:
    best = BestEvaluation("a", stop_after=2)
    assert [best.see(step, {"a": math.nan}) for step in (1, 2)] == [False, False]
    assert "no loss was finite" in best.ending
    assert best.facts() is None
    other = BestEvaluation("a", stop_after=2)
    other.restore(json.loads(json.dumps(best.state(), allow_nan=False)))
    assert other == best


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ({"checkpoint": {"keep_best": "code"}}, r"keep_best needs the evaluation set 'code'; .*: 'held-out'"),
        ({"train": {"stop_after_evaluations": 2}, "data": {"eval_fraction": 0}}, r"stop_after_.*'held-out'.*: none"),
        ({"train": {"stop_after_evaluations": 2}, "evaluation": {"every": 0}}, r"need evaluation.every above 0"),
    ],
)
def test_a_set_that_is_not_evaluated_is_refused(tables: dict[str, Any], match: str) -> None:
    with pytest.raises(BadValueError, match=match):
        RunSpec.from_tables({"model": {"type": "llama"}, **tables})


def test_a_watched_set_without_rows_is_refused(tmp_path: Path, corpus: Path) -> None:
    from weft.train.job import Job
    from weft.train.worker import run_job

    run = RunSpec.from_tables(run_tables(corpus, {"train.stop_after_evaluations": 2}))
    rows = [{"input_ids": [1, 2, 3], "labels": [2, 3, 4]}] * 8
    job = Job.create(run=run, plan_tables={}, out=tmp_path / "run", device="cpu")
    with pytest.raises(DataError, match=r"'held-out' of checkpoint.keep_best .*: no document is held out"):
        run_job(job, parts=TrainParts(data=rows))
