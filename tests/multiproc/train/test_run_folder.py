"""`weft train` as a user runs it on one rank: the run folder, stdout against stderr, signals, damaged checkpoints."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from samples import by_default
from tiny_run import (
    PATIENCE_S,
    checkpoint_steps,
    curve,
    last_step,
    metrics,
    rewind,
    running_weft,
    state_digest,
    stop_after,
    train_here,
    weft_command,
    write_run,
)
from waiting import wait_for

from weft.core.errors import CheckpointError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.ranks.process import leave

PROMISED = {
    "step",
    "loss",
    "grad_norm",
    "tokens",
    "tokens_per_s",
    "step_s",
    "peak_memory_bytes",
    "learning_rate",
}


@pytest.fixture(scope="module")
def command(
    corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished `weft train run.toml --set ... --out run --json`, and its folder."""
    folder = tmp_path_factory.mktemp("command")
    write_run(folder / "run.toml", corpus)
    arguments = ("train", "run.toml", "--set", "train.steps=6", "--set", "checkpoint.every=3", "--out", "run", "--json")
    return folder / "run", weft_command(*arguments, cwd=folder, cache=cache)


def test_stdout_is_one_json_object_and_talk_is_on_stderr(
    command: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, done = command
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == {"run_dir": str(run), **json.loads((run / "ledger.json").read_text())}
    assert "step 1/6" in done.stderr
    assert "finished at step 6" in done.stderr
    assert "Warning" not in done.stderr


def test_the_folder_has_every_promised_file(command: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    run, _ = command
    expected = {"run.toml", "plan.toml", "metrics.jsonl", "ledger.json", "report.html", "checkpoints", "tensorboard"}
    assert {path.name for path in run.iterdir()} == expected | {"model"}
    assert [*(run / "tensorboard").glob("events.out.tfevents.*")]
    assert checkpoint_steps(run) == [3, 6]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert 'src="http' not in page


def test_metrics_has_a_line_a_step_with_the_promised_fields(
    command: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    lines = metrics(command[0])
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() >= PROMISED for line in lines)
    assert all(line["tokens"] == 8 * 32 and line["step_s"] > 0 and line["peak_memory_bytes"] > 0 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if "eval_loss" in line] == [5, 6]


def test_run_and_plan_are_written_as_resolved_and_parse_back(
    command: tuple[Path, subprocess.CompletedProcess[str]], corpus: Path
) -> None:
    run, _ = command
    spec, plan = RunSpec.from_file(run / "run.toml"), Plan.from_file(run / "plan.toml")
    assert (spec.train.steps, spec.checkpoint.every, spec.data.source) == (6, 3, str(corpus))
    assert RunSpec.from_tables(spec.model_dump(mode="json", exclude_none=True)) == spec
    assert spec.to_toml() == (run / "run.toml").read_text(encoding="utf-8")
    assert plan == Plan()
    assert plan.to_toml() == (run / "plan.toml").read_text(encoding="utf-8")


def test_the_ledger_tells_run_memory_time_and_checkpoints(
    command: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    ledger = json.loads((command[0] / "ledger.json").read_text())
    facts = ledger["run"]
    assert (facts["status"], facts["steps"], facts["num_ranks"], facts["resumed_from"]) == ("finished", 6, 1, None)
    assert facts["final_loss"] == metrics(command[0])[-1]["loss"]
    weights = ledger["memory"]["terms"]["weights"]
    assert weights["predicted"] == 4 * ledger["model"]["parameters"]
    assert 0 <= weights["measured"] - weights["predicted"] < 512 * len(ledger["coverage"])  # tensors are rounded up
    assert {"forward_backward", "optimizer", "checkpoint", "data"} <= ledger["time"]["terms"].keys()
    assert [entry["step"] for entry in ledger["checkpoints"]] == [3, 6]
    assert ledger["dtypes"]
    assert {row["name"] for row in ledger["coverage"]} >= {"model.embed_tokens.weight", "lm_head.weight"}


def test_tensorboard_has_the_losses(command: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(command[0] / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(line["step"], pytest.approx(line["loss"])) for line in metrics(command[0])]


@pytest.mark.parametrize("number", by_default([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_saves_the_step_and_ends_with_zero(
    number: signal.Signals, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run.toml", corpus, {"train.steps": 20_000, "evaluation.every": 0})
    run = tmp_path / "run"
    with running_weft("train", "run.toml", "--out", "run", cwd=tmp_path, cache=cache) as process:
        wait_for(lambda: process.poll() is not None or last_step(run) >= 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    stopped = len(metrics(run))
    facts = json.loads((run / "ledger.json").read_text())["run"]
    assert (facts["status"], facts["steps"]) == ("stopped", stopped)
    assert checkpoint_steps(run) == [stopped]
    assert f"stopped at step {stopped}" in err

    settings = {"train.steps": 20_000, "evaluation.every": 0}
    with stop_after(stopped + 3):
        train_here(run, corpus, settings, resume=True)
    with stop_after(stopped + 3):
        train_here(tmp_path / "straight", corpus, settings)
    assert curve(run) == curve(tmp_path / "straight")
    assert state_digest(run) == state_digest(tmp_path / "straight")


def damage(checkpoint: Path) -> None:
    """One byte of the data flipped."""
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    command: tuple[Path, subprocess.CompletedProcess[str]],
    corpus: Path,
    cache: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = rewind(command[0], tmp_path / "run", step=6)
    settings = {"train.steps": 6, "checkpoint.every": 3}
    damage(run / "checkpoints" / "step-00000006")
    train_here(run, corpus, settings, resume=True)
    said = capfd.readouterr().err
    assert "step-00000006 is damaged" in said
    assert "SHA-256" in said
    assert "resuming from step 3" in said
    assert curve(run) == curve(command[0])
    assert state_digest(run) == state_digest(command[0])

    for step in checkpoint_steps(run):
        damage(run / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(CheckpointError, match=r"step-00000006: .*step-00000003: ") as caught:
        train_here(run, corpus, settings, resume=True)
    assert (caught.value.code, caught.value.exit_code) == ("W601", 2)
    leave()
    with pytest.raises(CheckpointError, match="3 failed verification"):  # set aside, and still no reason to start over
        train_here(run, corpus, settings, resume=True)


@pytest.mark.extended
def test_a_live_run_keeps_its_folder_and_a_killed_one_gives_it_up_at_once(
    corpus: Path, cache: Path, tmp_path: Path
) -> None:
    write_run(tmp_path / "run.toml", corpus, {"train.steps": 20_000, "evaluation.every": 0, "checkpoint.every": 3})
    run = tmp_path / "run"
    with running_weft("train", "run.toml", "--out", "run", "--nproc", "2", cwd=tmp_path, cache=cache) as process:
        wait_for(lambda: process.poll() is not None or bool(run.is_dir() and last_step(run) >= 5))
        owner = json.loads((run / "run.lock").read_text())
        assert owner["pid"] == process.pid  # the launcher's: its ranks may be started again
        refused = weft_command("train", "--resume", "run", cwd=tmp_path, cache=cache)
        assert refused.returncode == 2
        assert f"error [W502]: pid {process.pid} on {owner['host']} is training into" in refused.stderr
        process.kill()
        done = weft_command(
            "train", "--resume", "run", "--nproc", "1", "--set", "train.steps=4", cwd=tmp_path, cache=cache
        )
    assert done.returncode == 0, done.stderr
    assert "that process is gone" in done.stderr
    assert "resuming from step" in done.stderr
    steps = [line["step"] for line in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))
