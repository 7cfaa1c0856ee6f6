"""The end of a training: what a broken page must not take with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import train_here

from weft.train import worker


def test_a_report_that_cannot_be_drawn_does_not_fail_the_training(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Path) -> Path:
        raise FileNotFoundError("no template")

    monkeypatch.setattr(worker, "write_report", broken)
    ledger = train_here(tmp_path / "run", corpus, {"train.steps": 2})
    assert ledger["run"]["status"] == "finished"
    told = capsys.readouterr().err
    assert "the report was not drawn (FileNotFoundError: no template)" in told
    assert "weft report" in told
    assert (tmp_path / "run" / "ledger.json").exists()


def test_a_drawn_report_is_named(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(tmp_path / "run", corpus, {"train.steps": 2})
    assert f"open {tmp_path / 'run'}/report.html" in capsys.readouterr().err
