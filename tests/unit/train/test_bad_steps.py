"""Bad steps: skipped, rewound or stopped at, with the bits of a run without that batch's update; the batch is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import MARK, bad_samples, samples_left_out, without_update_of
from tiny_run import (
    GPT2,
    call_weft,
    checkpoint_steps,
    curve,
    metrics,
    run_tables,
    state_digest,
    train_here,
)

from weft.core.errors import BadValueError, NotBuiltError, NumbersError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.legality import require_legal
from weft.train.ranks.process import leave

ROWS = 8
BASE = {"train.steps": 8, "model": GPT2, "evaluation.every": 4, "logging.tensorboard": False}  # with dropout
BASE["ledger"] = {"measure": False, "dry_run": False}


def train(out: Path, corpus: Path, **settings: Any) -> dict[str, Any]:
    """`settings`: dots as double underscores."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    try:
        return train_here(out, corpus, {**BASE, **given})
    finally:
        leave()


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "bad_steps.jsonl").read_text().splitlines()]


def others(run: Path, step: int) -> list[str]:
    """The curve without one step, whose loss was planted."""
    return [line for line in curve(run) if json.loads(line)["step"] != step]


def test_a_skipped_batch_leaves_no_trace(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bad_samples([2 * ROWS + 3]):
        ledger = train(tmp_path / "run", corpus, train__on_bad_step="skip")
    with without_update_of(3):
        train(tmp_path / "reference", corpus)
    assert others(tmp_path / "run", 3) == others(tmp_path / "reference", 3)
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "reference")
    line = metrics(tmp_path / "run")[2]
    assert (line["loss"], line["skipped"], line["bad_step"]) == (None, True, "the loss is not finite")
    assert ledger["run"]["bad_steps"] == {"skipped": 1, "rewinds": 0}
    [event] = events(tmp_path / "run")
    assert event == {
        "step": 3,
        "reason": "the loss is not finite",
        "loss": None,
        "grad_norm": None,
        "first_sample": 16,
        "action": "skip",
        "batch": "bad_steps/step-00000003-sample-00000016.npz",
    }
    kept = np.load(tmp_path / "run" / event["batch"])
    assert kept["samples"].tolist() == list(range(16, 24))
    assert [row for row in range(ROWS) if kept["input_ids"][row, 0] == MARK] == [3]
    assert kept["input_ids"].shape == kept["labels"].shape == (ROWS, 32)
    assert len(kept["rows"]) == ROWS
    said = capsys.readouterr().err
    assert "warning: step 3 made no update: the loss is not finite; samples 16 to 23 are in bad_steps/step-" in said
    assert "step-00000003-sample-00000016.npz" in (tmp_path / "run" / "report.html").read_text()


def test_a_rewind_goes_on_after_the_batch(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bad_samples([4 * ROWS]):
        ledger = train(
            tmp_path / "run", corpus, train__on_bad_step="rewind", checkpoint__every=3, logging__tensorboard=True
        )
    with samples_left_out(3 * ROWS, 2 * ROWS):  # step 4's rows are not seen again either
        train(tmp_path / "reference", corpus, checkpoint__every=3)
    assert curve(tmp_path / "run") == curve(tmp_path / "reference")
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "reference")
    assert ledger["run"]["bad_steps"] == {"skipped": 0, "rewinds": 1}
    assert [event["action"] for event in events(tmp_path / "run")] == ["rewind"]
    assert "goes back to step 3 and on with sample 40 (rewind 1 of 3)" in capsys.readouterr().err


def test_rewinds_are_counted_and_begin_at_step_0(tmp_path: Path, corpus: Path) -> None:
    with (
        bad_samples(range(2 * ROWS, 100 * ROWS)),
        pytest.raises(NumbersError, match=r"step 1 was bad after 2 rewinds: the loss is not finite .*samples 32 to 39"),
    ):
        train(tmp_path / "run", corpus, train__on_bad_step="rewind", train__max_rewinds=2)
    assert checkpoint_steps(tmp_path / "run") == [0]
    assert [event["action"] for event in events(tmp_path / "run")] == ["rewind", "rewind", "stop"]


def test_a_stop_saves_the_state_before_the_step(tmp_path: Path, corpus: Path) -> None:
    with bad_samples([4 * ROWS]):
        with pytest.raises(NumbersError, match=r"step 5 was bad: .*bad_steps/step-00000005") as caught:
            train(tmp_path / "run", corpus, train__on_bad_step="stop")
        assert "continues from step 4" in caught.value.hint
        assert checkpoint_steps(tmp_path / "run") == [4]
        code, _, err = call_weft("train", "--resume", tmp_path / "run", "--set", "train.on_bad_step=skip")
        leave()
        assert code == 0, err
        train(tmp_path / "skipped", corpus, train__on_bad_step="skip")
    assert [json.loads(line)["loss"] for line in curve(tmp_path / "run")] == [
        json.loads(line)["loss"] for line in curve(tmp_path / "skipped")
    ]
    assert state_digest(tmp_path / "run") == state_digest(tmp_path / "skipped")


def test_a_spike_is_a_bad_step(tmp_path: Path, corpus: Path) -> None:
    spikes = {"train__on_bad_step": "skip", "train__spike_factor": 3.0, "train__steps": 11}
    with bad_samples([2 * ROWS, 9 * ROWS], factor=20.0):  # the first before the median is known
        train(tmp_path / "run", corpus, **spikes)
    [event] = events(tmp_path / "run")
    assert event["step"] == 10
    assert "times" in event["reason"]
    assert event["loss"] > 20
    assert [line["step"] for line in metrics(tmp_path / "run") if line.get("skipped")] == [10]
    with bad_samples([9 * ROWS], factor=20.0):
        train(tmp_path / "off", corpus, **{**spikes, "train__spike_factor": 0.0})
    assert not (tmp_path / "off" / "bad_steps.jsonl").exists()


def test_without_a_policy_the_run_ends_and_the_batch_is_kept(tmp_path: Path, corpus: Path) -> None:
    with (
        bad_samples([4 * ROWS + 7]),
        pytest.raises(NumbersError, match=r"the loss of step 5 is not finite: .*samples 32 to 39 are in bad_steps/"),
    ):
        train(tmp_path / "run", corpus)
    [event] = events(tmp_path / "run")
    kept = np.load(tmp_path / "run" / event["batch"])
    assert kept["input_ids"][7, 0] == MARK


def run_of(corpus: Path, **train: Any) -> RunSpec:
    return RunSpec.from_tables(run_tables(corpus, {f"train.{key}": value for key, value in train.items()}))


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream", "microbatches": 4}}, "on_bad_step with pipedream"),
        ({"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream_2bw", "microbatches": 4}}, "with pipedream_2bw"),
        ({"offload": {"optimizer": "cpu", "delayed": True}}, r"on_bad_step with offload\.delayed"),
        ({"offload": {"optimizer": "nvme"}}, "on_bad_step with states in files"),
        ({"data_parallel": {"error_feedback": True}, "precision": {"reduce": "int8"}}, "on_bad_step with data_par"),
    ],
)
def test_plans_that_cannot_decide_before_the_update_are_refused(plan: Any, match: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, on_bad_step="skip", steps=4)
    with pytest.raises(NotBuiltError, match=match):
        require_legal(Plan.from_tables(plan), run)
    require_legal(Plan.from_tables(plan), run_of(tmp_path))


def test_a_rewind_beside_copies_in_memory_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path, on_bad_step="rewind").model_copy(
        update={"checkpoint": run_of(tmp_path).checkpoint.model_copy(update={"memory_every": 2})}
    )
    with pytest.raises(NotBuiltError, match=r"rewind' with checkpoint\.memory_every"):
        require_legal(Plan(), run)


@pytest.mark.parametrize(
    ("keys", "match"), [({"spike_factor": 0.5}, "0, or above 1"), ({"spike_factor": 2.0}, "needs on_bad_step")]
)
def test_bad_keys_are_refused(keys: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match=match):
        run_of(tmp_path, **keys)
