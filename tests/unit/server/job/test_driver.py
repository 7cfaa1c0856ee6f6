"""Whole runs in one process: the same curve however it is cut, modes, resume, places of dense parameters, errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from weft.core.errors import BadValueError, DataError, ModelError, RunFolderError, WorkerError
from weft.core.server_spec import ServerRun
from weft.core.table_spec import Eviction
from weft.server.job.driver import run_job
from weft.server.job.records import ServerStepRecord
from weft.server.job.trainer import Trainer
from weft.server.model.embedding import ShardedEmbedding


def _run(*, steps: int = 6, data: dict[str, Any] | None = None, dense: str = "servers", **server: Any) -> ServerRun:
    return ServerRun.from_tables(
        {
            "model": {"embedding_dim": 4, "hidden": [8]},
            "data": data or {"samples": 2000, "vocabulary": 50, "categorical": 5, "numeric": 2},
            "dense": {"place": dense},
            "train": {"steps": steps, "global_batch": 32},
            "server": {"launcher": "in_process", "workers": 1, **server},
            "evaluation": {"every": 3},
            "checkpoint": {"every": 4},
            "logging": {"tensorboard": False},
        }
    )


def _train(out: Path, run: ServerRun, **more: Any) -> list[dict[str, Any]]:
    run_job(run, out, quiet=True, **more)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def _curve(lines: list[dict[str, Any]], name: str = "loss") -> list[float]:
    return [line[name] for line in lines if name in line]


def test_a_sync_run_is_bit_equal_over_servers_and_close_over_workers(tmp_path: Path) -> None:
    first = _train(tmp_path / "a", _run(workers=2))
    servers = _train(tmp_path / "b", _run(workers=2, servers=3))
    alone = _train(tmp_path / "c", _run())
    assert _curve(first) == _curve(servers)
    assert _curve(first, "auc") == _curve(servers, "auc")
    np.testing.assert_allclose(_curve(first), _curve(alone), rtol=1e-5)
    assert [line["step"] for line in first if "auc" in line] == [3, 6]
    assert [line["samples"] for line in first] == [32] * 6


def test_the_run_folder_is_complete(tmp_path: Path) -> None:
    run = _run(workers=2, servers=2)
    ledger = run_job(run, tmp_path / "a", quiet=True)
    assert ServerRun.from_file(tmp_path / "a" / "run.toml") == run
    assert ledger == json.loads((tmp_path / "a" / "ledger.json").read_text())
    assert ledger["run"]["status"] == "finished"
    figures = json.loads((tmp_path / "a" / "server.json").read_text())
    assert sum(worker["units"] for worker in figures["workers"]) == 12
    assert sum(figures["staleness"].values()) == 24  # every unit on both servers
    assert len(figures["hot_keys"]["embedding"]) == 20
    assert [entry["step"] for entry in figures["evaluations"]] == [3, 6]
    assert all(server["rows"] > 0 for server in figures["servers"])
    with pytest.raises(RunFolderError, match="exists already"):
        run_job(run, tmp_path / "a", quiet=True)


def test_geo_with_one_worker_and_one_step_is_local_training(tmp_path: Path) -> None:
    sync = _train(tmp_path / "a", _run())
    geo = _train(tmp_path / "b", _run(mode="geo", geo_steps=1))
    np.testing.assert_allclose(_curve(sync), _curve(geo), rtol=1e-5)
    np.testing.assert_allclose(_curve(sync, "auc"), _curve(geo, "auc"), rtol=1e-4)


def test_geo_of_several_workers_finishes_every_unit(tmp_path: Path) -> None:
    lines = _train(tmp_path / "a", _run(mode="geo", geo_steps=4, workers=3, servers=2))
    assert [line["samples"] for line in lines] == [32] * 6


def test_async_runs_and_counts_staleness(tmp_path: Path) -> None:
    lines = _train(tmp_path / "a", _run(mode="async", staleness=2, workers=3, steps=12))
    assert [line["step"] for line in lines] == list(range(1, 13))
    figures = json.loads((tmp_path / "a" / "server.json").read_text())
    assert all(int(tau) <= 3 * 3 - 1 for tau in figures["staleness"])  # (staleness + 1) steps of 3 units, but its own


@pytest.mark.parametrize("mode", ["sync", "geo"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, mode: str) -> None:
    more = {"mode": mode, "geo_steps": 1}
    whole = _train(tmp_path / "a", _run(**more))
    _train(tmp_path / "b", _run(steps=3, **more))
    resumed = _train(tmp_path / "b", _run(**more), resume=True)
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    # Optimizer state of geo stays with its worker, so a resumed geo run is only near.
    np.testing.assert_allclose(_curve(whole), _curve(resumed), rtol=0 if mode == "sync" else 0.05)
    with pytest.raises(RunFolderError, match="run on servers"):
        run_job(_run(), tmp_path / "none", resume=True)


def test_replicated_dense_parameters_follow_the_servers_curve_and_resume(tmp_path: Path) -> None:
    servers = _train(tmp_path / "a", _run(workers=2))
    replicated = _train(tmp_path / "b", _run(workers=2, dense="replicated"))
    np.testing.assert_allclose(_curve(servers), _curve(replicated), rtol=1e-5)
    np.testing.assert_allclose(_curve(servers, "auc"), _curve(replicated, "auc"), rtol=1e-3)
    _train(tmp_path / "c", _run(steps=3, workers=2, dense="replicated"))
    resumed = _train(tmp_path / "c", _run(workers=2, dense="replicated"), resume=True)
    assert _curve(resumed) == _curve(replicated)


def test_files_are_trained_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(2)},{rng.integers(9)},{'abc'[rng.integers(3)]},{rng.integers(5)}" for _ in range(200)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    data = {"source": str(tmp_path / "log.csv"), "numeric": 1, "categorical": 2}
    assert len(_train(tmp_path / "a", _run(data=data, workers=2))) == 6
    with pytest.raises(DataError, match="there is no file"):
        run_job(_run(data={**data, "source": str(tmp_path / "none.csv")}), tmp_path / "b", quiet=True)


class _Bags:
    """A task of the user's own: bags of words and a target, two tables, squared error."""

    num_train = 64

    def build_model(self) -> nn.Module:
        return _BagModel()

    def read(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        words = torch.from_numpy(indices[:, None] * 7 % np.array([5, 11, 13]))
        return words, words.sum(1).float() / 10

    def wanted(self, batch: Any) -> Mapping[str, Any]:
        return {}

    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        words, target = self.read(np.arange(64))
        with torch.no_grad():
            return {"loss": float(F.mse_loss(model(words), target))}


class _BagModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = ShardedEmbedding("bag", 3, mode="mean")
        self.wide = ShardedEmbedding("wide", 1)
        self.out = nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.bag(words)).squeeze(1) + self.wide(words).sum((1, 2))


def test_rows_are_evicted_where_a_rule_says_so(tmp_path: Path) -> None:
    free, capped = _run(steps=8), _run(steps=8)
    sparse = capped.sparse.model_copy(update={"eviction": Eviction(max_rows=20)})
    capped = capped.model_copy(update={"sparse": sparse})
    rows = {}
    for name, run in (("free", free), ("capped", capped)):
        run_job(run, tmp_path / name, quiet=True)
        tables = json.loads((tmp_path / name / "server.json").read_text())["servers"][0]["tables"]
        rows[name] = {table["name"]: table["rows"] for table in tables}
    assert rows["capped"]["embedding"] == 20 < rows["free"]["embedding"]
    assert rows["capped"]["dense"] == rows["free"]["dense"]


class _StopAfter:
    """Stands in for the signal: asks for a stop once so many steps are written."""

    lines, path = 0, Path()

    def __enter__(self) -> _StopAfter:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def requested(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        return metrics.exists() and len(metrics.read_text().splitlines()) >= self.lines


def _evicting(**rule: int) -> ServerRun:
    run = _run(steps=12, workers=2, servers=2)
    return run.model_copy(update={"sparse": run.sparse.model_copy(update={"eviction": Eviction(**rule)})})


@pytest.mark.parametrize("rule", [{"max_rows": 20}, {"min_count": 3}, {"max_age": 3}])
def test_a_stop_adds_no_eviction_so_that_a_resumed_run_has_the_bits_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: dict[str, int]
) -> None:
    run = _evicting(**rule)
    whole = _train(tmp_path / "whole", run)
    with monkeypatch.context() as patch:
        patch.setattr("weft.server.job.driver.StopFlag", _StopAfter)
        patch.setattr(_StopAfter, "lines", 4)
        patch.setattr(_StopAfter, "path", tmp_path / "cut")
        stopped = _train(tmp_path / "cut", run)
    assert len(stopped) in (5, 6), "between two snapshots"
    resumed = _train(tmp_path / "cut", run, resume=True)
    assert _curve(resumed) == _curve(whole)
    assert resumed[-1]["auc"] == whole[-1]["auc"]
    assert _tables(tmp_path / "cut") == _tables(tmp_path / "whole")


def _tables(folder: Path) -> list[Any]:
    servers = json.loads((folder / "server.json").read_text())["servers"]
    return [(table["name"], table["rows"]) for server in servers for table in server["tables"]]


def test_what_is_evaluated_is_what_is_saved(tmp_path: Path) -> None:
    run = _evicting(max_rows=5)
    last = _train(tmp_path / "a", run)[-1]
    again = run.model_copy(update={"evaluation": run.evaluation.model_copy(update={"every": 12})})
    run_job(again, tmp_path / "a", resume=True, quiet=True)  # nothing is left to train: it evaluates what was saved
    evaluation = json.loads((tmp_path / "a" / "server.json").read_text())["evaluations"][-1]
    assert (evaluation["step"], evaluation["auc"]) == (12, last["auc"])


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    run = _run(data={"source": str(tmp_path / "missing.csv"), "categorical": 5, "numeric": 2})
    with pytest.raises(DataError):
        run_job(run, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_trainer_takes_a_task_of_ones_own(tmp_path: Path) -> None:
    ledger = Trainer(lambda run: _Bags(), run=_run(steps=40, workers=2, mode="async"), quiet=True).fit(tmp_path / "a")
    assert ledger["run"]["eval_loss"] < 0.2 * ledger["run"]["first_loss"]
    assert ledger["run"]["auc"] is None


def test_a_function_cannot_travel_and_a_name_must_exist(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="cannot be given a function"):
        Trainer(lambda run: _Bags(), run=_run(launcher="processes")).fit(tmp_path / "a")
    with pytest.raises(ModelError, match="cannot be imported"):
        Trainer("no_such_module:build", run=_run()).fit(tmp_path / "b")
    with pytest.raises(ModelError, match="the factory gave a int"):
        Trainer(lambda run: 3, run=_run()).fit(tmp_path / "c")


class _Failing(_Bags):
    def loss_sum(self, model: nn.Module, batch: Any) -> Tensor:
        raise ZeroDivisionError("nothing to divide by")


def test_a_workers_error_is_the_runs_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"worker \d: ZeroDivisionError: nothing to divide by"):
        Trainer(lambda run: _Failing(), run=_run(workers=2), quiet=True).fit(tmp_path / "a")


def test_a_record_is_json_there_and_back() -> None:
    record = ServerStepRecord(
        step=3,
        loss=float("nan"),
        samples=32,
        step_s=0.5,
        samples_per_s=64.0,
        learning_rate=0.1,
        staleness_mean=1.5,
        wait_s=0.25,
        auc=0.7,
    )
    fields = json.loads(json.dumps(record.as_dict()))
    assert fields["loss"] is None
    assert ServerStepRecord.from_dict(fields).as_dict() == record.as_dict()
