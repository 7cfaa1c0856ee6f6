"""The run folder: what is written parses back, and a crash in mid-line loses that line alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import RunFolderError
from weft.core.plan import Plan
from weft.core.records import StepRecord
from weft.core.run_spec import RunSpec
from weft.train.folder.run_folder import RunFolder, require_run
from weft.train.folder.state import require_free
from weft.train.loggers.metrics import MetricsWriter


def record(step: int, **fields: float) -> StepRecord:
    return StepRecord(step=step, loss=1.0 / step, grad_norm=1.0, tokens=8, learning_rate=1e-3, **fields)  # type: ignore[arg-type]


def test_the_two_documents_parse_back(tmp_path: Path) -> None:
    run, plan = RunSpec.default(), Plan.from_tables({"mesh": {"dp_shard": 2}})
    folder = RunFolder(tmp_path / "deep" / "run")
    folder.create(run, plan)
    require_run(folder.path)
    assert RunSpec.from_file(folder.path / "run.toml") == run
    assert Plan.from_file(folder.path / "plan.toml") == plan


def test_a_torn_last_line_and_later_steps_are_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in range(1, 6):
        folder.metrics.append(record(step, eval_loss=0.5))
    with folder.metrics.path.open("a") as file:
        file.write('{"step": 6, "loss": 0.1')  # the process died here
    assert [kept.step for kept in folder.metrics.read()] == [1, 2, 3, 4, 5]
    kept = folder.metrics.drop_after(3)
    assert kept == [record(step, eval_loss=0.5) for step in (1, 2, 3)]
    folder.metrics.append(record(4))
    assert folder.metrics.read() == [*kept, record(4)]
    assert len(folder.metrics.path.read_text().splitlines()) == 4
    assert RunFolder(tmp_path / "new").metrics.read() == []


def test_the_ledger_parses_back_and_leaves_no_draft(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_ledger() == {}
    folder.write_ledger({"version": 1})
    assert folder.read_ledger() == {"version": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.json"]


def test_folders_in_the_way_and_folders_that_are_no_run(tmp_path: Path) -> None:
    require_free(tmp_path)  # empty
    require_free(tmp_path / "new")
    with pytest.raises(RunFolderError, match=r"no run\.toml"):
        require_run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="exists already") as caught:
        require_free(tmp_path)
    assert "--resume" in caught.value.hint
    with pytest.raises(RunFolderError, match="exists already"):
        require_free(tmp_path / "file")
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").create(RunSpec.default(), Plan())


def test_metrics_go_to_both_places_on_the_writing_rank_only(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    writer = MetricsWriter(folder, is_writing=True, tensorboard=True, earlier=[record(1)])
    writer.write(record(2, eval_loss=0.3))
    writer.close()
    assert [kept.step for kept in writer.records] == [1, 2]
    assert [kept.step for kept in folder.metrics.read()] == [2]
    assert any(folder.tensorboard_path.iterdir())
    silent = RunFolder(tmp_path / "silent")
    other = MetricsWriter(silent, is_writing=False, tensorboard=True, earlier=[])
    other.write(record(1))
    other.close()
    assert other.records == [record(1)]
    assert not silent.path.exists()
