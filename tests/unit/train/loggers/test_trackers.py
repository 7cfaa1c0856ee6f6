"""Trackers against stand-ins of their libraries: what they get, and that no failure of one reaches the training."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from weft.cli.early_checks import require_inputs
from weft.core.errors import MissingExtraError
from weft.core.records import StepRecord
from weft.core.run_spec import RunSpec
from weft.train.folder.run_folder import RunFolder
from weft.train.loggers import trackers
from weft.train.loggers.metrics import MetricsWriter
from weft.train.loggers.trackers import Trackers

UNREACHABLE = "http://127.0.0.1:9"  # discard: nothing listens


class StandIn:
    """Calls of a library, by the name of the function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls.append((name, args, keywords))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, keywords) for called, args, keywords in self.calls if called == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """One stand-in for all three; as a tracker's own objects too."""
    for name in ("WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", UNREACHABLE)
    found = StandIn()
    found.entities = types.SimpleNamespace(Metric=lambda *fields: fields)
    found.info = types.SimpleNamespace(run_id="run-1")
    found.experiment_id = "experiment-1"
    found.search_runs = lambda *args, **keywords: []
    for name in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(sys.modules, name, found)
    return found


def run_with(*kinds: str, **track: Any) -> RunSpec:
    tables = RunSpec.default().model_dump(mode="json", exclude_none=True)
    return RunSpec.from_tables({**tables, "track": {"kind": list(kinds), **track}})


def tracked(run: RunSpec, folder: Path, *, is_finished: bool = True) -> None:
    """Three steps through the writer that a training has."""
    (folder / "a-run").mkdir()
    given = Trackers(run, folder / "a-run")
    made = RunFolder(folder / "a-run")
    writer = MetricsWriter(made, is_writing=True, tensorboard=False, earlier=[], trackers=given)
    for step in range(1, 4):
        writer.write(StepRecord(step=step, loss=4.0 / step, grad_norm=1.0, tokens=8, learning_rate=1e-3))
    writer.close(is_finished=is_finished)
    assert len(made.metrics.read()) == 3


def test_wandb_gets_every_step_and_the_run(library: StandIn, tmp_path: Path) -> None:
    tracked(run_with("wandb", project="tests"), tmp_path)
    ((_, opened),) = library.named("init")
    assert (opened["project"], opened["name"], opened["mode"]) == ("tests", "a-run", "offline")
    assert opened["config"]["train"]["steps"] == 200
    assert opened["dir"] == str(tmp_path / "a-run")
    logged = [(keywords["step"], args[0]["train/loss"]) for args, keywords in library.named("log")]
    assert logged == [(1, 4.0), (2, 2.0), (3, 4.0 / 3)]
    assert library.named("finish") == [((), {"exit_code": 0})]


def test_a_resumed_run_continues_under_its_id(library: StandIn, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    for folder in ("one", "one", "two"):
        Trackers(run_with("wandb"), tmp_path / folder).close(is_finished=True)
    first, again, other = (keywords["id"] for _, keywords in library.named("init"))
    assert first == again != other


def test_variables_of_wandb_go_first(library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracked(run_with("wandb"), tmp_path)
    assert "mode" not in library.named("init")[0][1]


@pytest.mark.parametrize(("asked", "mode"), [(False, "online"), (True, "offline")])
def test_offline_as_asked(library: StandIn, tmp_path: Path, asked: bool, mode: str) -> None:
    tracked(run_with("wandb", offline=asked), tmp_path)
    assert library.named("init")[0][1]["mode"] == mode


def test_mlflow_writes_into_the_run_folder_without_a_server(library: StandIn, tmp_path: Path) -> None:
    tracked(run_with("mlflow"), tmp_path, is_finished=False)
    ((_, opened),) = library.named("MlflowClient")
    assert opened["tracking_uri"] == f"sqlite:///{tmp_path / 'a-run' / 'mlflow.db'}"
    batches = [keywords["metrics"] for _, keywords in library.named("log_batch")]
    assert [next(one[1] for one in batch if one[0] == "train/loss") for batch in batches] == [4.0, 2.0, 4.0 / 3]
    assert ("run-1", "train.steps", "200") in [args for args, _ in library.named("log_param")]
    assert library.named("set_terminated") == [(("run-1", "FAILED"), {})]


def test_trackio(library: StandIn, tmp_path: Path) -> None:
    tracked(run_with("trackio"), tmp_path)
    assert library.named("init")[0][1]["config"]["train.steps"] == 200
    assert [keywords["step"] for _, keywords in library.named("log")] == [1, 2, 3]
    assert len(library.named("finish")) == 1


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no quota"), SystemExit(1)])
def test_a_tracker_that_fails_is_one_note_and_the_others_go_on(
    library: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
    error: BaseException,
) -> None:
    def fail(*args: Any, **keywords: Any) -> None:
        raise error

    broken = StandIn()
    broken.init = lambda **keywords: broken
    setattr(broken, failing, fail)
    monkeypatch.setitem(sys.modules, "wandb", broken)
    tracked(run_with("wandb", "trackio"), tmp_path)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert "the tracker wandb gets no more steps" in notes[0]
    assert len(library.named("log")) == 3


def test_a_tracker_that_hangs_does_not_hold_the_run(
    library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    released = threading.Event()
    monkeypatch.setattr(trackers, "CLOSE_S", 0.1)
    library.init = lambda **keywords: released.wait() and library
    tracked(run_with("trackio"), tmp_path)
    assert "did not finish in time" in capsys.readouterr().err
    released.set()


def test_a_missing_library_is_refused_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.core.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs mlflow") as caught:
        require_inputs(run_with("mlflow"))
    assert "weft-train[mlflow]" in caught.value.hint
