"""Reading a folder as it was left: resumed, cut in mid-line, with numbers that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.report.fields import number, rows, table
from weft.report.folder import TrainingFolder, _parse_step, _replay, read_folder


def lines(*steps: int, **fields: Any) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0, **fields}) + "\n" for step in steps)


def folder_with(tmp_path: Path, metrics: str) -> TrainingFolder:
    (tmp_path / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    return read_folder(tmp_path)


def test_a_resume_drops_the_abandoned_steps(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, lines(1, 2, 3, 4, 5, 6, loss=9.0) + lines(3, 4, loss=2.0))
    assert [(step.step, step.loss) for step in folder.metrics.steps] == [(1, 9.0), (2, 9.0), (3, 2.0), (4, 2.0)]
    assert folder.metrics.resumed_after == (2,)
    assert "4 steps were run again" in " ".join(folder.remarks)


def test_a_line_cut_by_a_kill_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, lines(1, 2) + '{"step": 3, "lo')
    assert [step.step for step in folder.metrics.steps] == [1, 2]
    assert folder.metrics.num_unreadable == 1
    assert any("could not be read" in remark for remark in folder.remarks)


def test_a_missing_number_is_a_gap_and_never_a_zero(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, '{"step": 1, "loss": NaN}\n{"step": 2, "loss": null}\n{"step": 3, "loss": "x"}\n')
    assert len(folder.metrics.steps) == 3
    assert all(math.isnan(step.loss) and math.isnan(step.grad_norm) for step in folder.metrics.steps)


def test_metrics_that_begin_late_are_remarked(tmp_path: Path) -> None:
    assert any("begins at step 51" in remark for remark in folder_with(tmp_path, lines(51, 52)).remarks)


def test_broken_documents_are_remarks(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{", encoding="utf-8")
    (tmp_path / "plan.toml").write_text("mesh = [", encoding="utf-8")
    remarks = " ".join(folder_with(tmp_path, lines(1)).remarks)
    assert "ledger.json is not JSON" in remarks
    assert "plan.toml is not TOML" in remarks


def test_walking_a_ledger_never_fails() -> None:
    assert table({"a": {"b": {"c": 1}}}, "a", "b") == {"c": 1}
    assert table({"a": 3}, "a", "b") == {}
    assert rows({"a": [{"x": 1}, 2, None]}, "a") == [{"x": 1}]
    assert rows(None, "a") == []
    assert [number(value) for value in (1, 2.5, True, None, "3", math.inf, math.nan)] == [1.0, 2.5, *[None] * 5]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 12), max_size=40))
def test_what_is_kept_always_grows_and_ends_with_the_last_line(steps: list[int]) -> None:
    metrics = _replay(lines(*steps), _parse_step)
    kept = [step.step for step in metrics.steps]
    assert kept == sorted(set(kept))
    assert len(kept) + metrics.num_repeated == len(steps)
    assert not steps or kept[-1] == steps[-1]
