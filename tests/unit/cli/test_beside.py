"""The dry run beside a training: whatever becomes of it, the ledger gets a column or a remark, and it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_run import run_tables, write_corpus

from weft.cli.dryrun import beside
from weft.cli.dryrun.beside import DryRunBeside
from weft.core.run_spec import RunSpec
from weft.train.folder.run_folder import RunFolder
from weft.train.job import Job
from weft.train.ledger.rows import row

LEDGER: dict[str, Any] = {
    "run": {"status": "finished"},
    "memory": {"terms": {"weights": row(predicted=4, measured=4)}, "total": row(predicted=4, measured=4)},
    "traffic": [],
    "time": {"terms": {}},
    "remarks": [],
}
DRY = {
    "rank": 0,
    "memory": {"peak_bytes": 8, "terms": {"weights": 8}},
    "traffic": [],
    "flops": 1,
    "elapsed_s": 1.0,
    "notes": [],
}

Join = Callable[[str], dict[str, Any]]


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Join:
    """Joins a process of this Python code as if it were the dry run; returns the ledger."""
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    run = RunSpec.from_tables(run_tables(write_corpus(tmp_path / "texts", num_documents=1)))
    job = Job.create(run=run, plan_tables={}, out=folder.path, quiet=True)
    monkeypatch.setattr("weft.train.worker.write_report", lambda _: None)

    def carry_out(code: str, status: str = "finished") -> dict[str, Any]:
        folder.write_ledger({**LEDGER, "run": {"status": status}})
        started: list[subprocess.Popen[bytes]] = []

        def start(self: DryRunBeside) -> subprocess.Popen[bytes]:
            said = self._path("output.txt").open("wb")
            command = [sys.executable, "-c", code, str(self._path("answer.json"))]
            started.append(subprocess.Popen(command, stdout=said, stderr=said))
            said.close()
            return started[0]

        monkeypatch.setattr(DryRunBeside, "_start", start)
        with DryRunBeside(job) as running:
            running.join(folder)
        assert started[0].poll() is not None
        return folder.read_ledger()

    return carry_out


def answering(answer: dict[str, Any]) -> str:
    return f"import pathlib, sys; pathlib.Path(sys.argv[1]).write_text({json.dumps(answer)!r})"


def test_an_answer_is_a_column(join: Join) -> None:
    ledger = join(answering(DRY))
    assert ledger["memory"]["terms"]["weights"] == row(predicted=4, dry_run=8, measured=4)
    assert ledger["remarks"] == []


@pytest.mark.parametrize(
    ("code", "remark"),
    [
        (answering({"error": {"message": "it decides by values"}}), "no dry run: it decides by values"),
        ("raise SystemExit('boom')", "no dry run: it ended with code 1 (boom)"),
    ],
)
def test_a_failed_one_is_a_remark(code: str, remark: str, join: Join) -> None:
    ledger = join(code)
    assert ledger["remarks"] == [remark]
    assert ledger["memory"]["terms"]["weights"]["dry_run"] is None


def test_a_slow_one_is_ended(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "WAIT_S", 0.2)
    assert join("import time; time.sleep(60)")["remarks"] == ["no dry run: the training ended first"]


def test_the_real_process_takes_the_resolved_files_and_writes_an_answer(tmp_path: Path) -> None:
    run = RunSpec.from_tables(run_tables(write_corpus(tmp_path / "texts", num_documents=1)))
    job = Job.create(run=run, plan_tables={"precision": {"preset": "bf16"}}, out=tmp_path / "run", quiet=True)
    with DryRunBeside(job) as running:
        answer, remark = running._answer(wait_s=120.0)
    assert remark == ""
    assert answer is not None
    assert (answer["rank"], answer["world_size"]) == (0, 1)
    assert answer["memory"]["terms"]["gathered_weights"] > 0  # the casts of bf16
