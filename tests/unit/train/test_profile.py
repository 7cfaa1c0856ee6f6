"""`weft profile`: the trace has the asked steps and no other, the report links it, the training is unchanged by it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tiny_run import call_weft, metrics, train_here, write_run

QUIET = {"ledger": {"measure": False, "dry_run": False}, "logging.tensorboard": False}


def names_in(trace: Path) -> list[str]:
    """The names of all events of a trace."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [str(event.get("name")) for event in events]


def test_the_verb_records_the_asked_steps(tmp_path: Path, corpus: Path) -> None:
    run, out = write_run(tmp_path / "run.toml", corpus, QUIET), tmp_path / "profiled"
    options = ["--after", "2", "--steps", "2", "--out", str(out), "--json"]
    code, answer, said = call_weft("profile", str(run), *options)
    assert code == 0
    assert "profile: profile/trace-rank0.json.gz" in said
    found = json.loads(answer)
    assert found["files"] == ["profile/operators.json", "profile/trace-rank0.json.gz"]
    assert (found["first_step"], found["last_step"], found["device"]) == (3, 4, "cpu")
    names = names_in(out / "profile" / "trace-rank0.json.gz")
    steps = {name for name in names if name.startswith("step ")}
    assert steps == {"step 3", "step 4"}
    assert "aten::mm" in names
    assert "[memory]" in names
    shares = {row["name"]: row["self_s"] for row in found["operators"]}
    assert sum(shares.values()) <= found["total_s"] * 1.0001
    assert shares["aten::mm"] > 0
    assert len(metrics(out)) == 4
    assert not list((out / "checkpoints").glob("step-*"))
    page = (out / "report.html").read_text()
    assert 'href="profile/trace-rank0.json.gz"' in page
    assert "steps 3 to 4" in page


def test_a_profile_within_a_run_leaves_its_numbers(tmp_path: Path, corpus: Path) -> None:
    plain = train_here(tmp_path / "plain", corpus, {**QUIET, "train.steps": 6})
    asked = {"first_step": 3, "steps": 2, "memory": False}
    train_here(tmp_path / "profiled", corpus, {**QUIET, "train.steps": 6, "profile": asked})
    assert plain["run"]["status"] == "finished"
    one, other = ([line["loss"] for line in metrics(tmp_path / name)] for name in ("plain", "profiled"))
    assert one == other
    assert "[memory]" not in names_in(tmp_path / "profiled" / "profile" / "trace-rank0.json.gz")


def test_a_run_that_ends_within_the_steps_still_writes(tmp_path: Path, corpus: Path) -> None:
    asked = {"first_step": 3, "steps": 9}
    train_here(tmp_path / "run", corpus, {**QUIET, "train.steps": 4, "profile": asked})
    names = names_in(tmp_path / "run" / "profile" / "trace-rank0.json.gz")
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
