"""`weft verify` as a user runs it: every plan of two ranks passes, in one command (`-m slow`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
from tiny_run import weft_command
from verify_ranks import small_run


@pytest.mark.slow  # a hundred seconds each
@pytest.mark.parametrize(("family", "num_contexts"), [("qwen3-tied", 3), ("gemma2", 2)])  # no ring has soft caps
def test_every_plan_of_two_ranks_passes(family: str, num_contexts: int, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(small_run(str(corpus), model=family)), encoding="utf-8")
    options = ("--all", "--nproc", "2", "--steps", "3", "--json", "--matrix", "matrix.html")
    done = weft_command("verify", "run.toml", *options, cwd=tmp_path, cache=tmp_path / "cache", patience_s=480)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [verdict["plan"].partition(",")[0] for verdict in answer["verdicts"]] == [
        "DDP",
        "ZeRO-1",
        "ZeRO-2",
        "ZeRO-3 (FSDP)",
        *["tensor parallel"] * 4,
        *["pipeline"] * 5,  # those of one stage a rank: two blocks make no more; ties keep pipedream out
        "ZeRO-3 (FSDP)",
        *["context parallel"] * num_contexts,
    ]
    assert answer["ok"]
    assert all(len(verdict["checks"]) >= 17 for verdict in answer["verdicts"])
    assert len({verdict["plan"] for verdict in answer["verdicts"]}) == 14 + num_contexts
    cut = answer["verdicts"][7]
    assert cut["replicated_parameters"] == [row["name"] for row in cut["coverage"] if row["reason"]]
    assert "model.norm.weight" in cut["replicated_parameters"]
    assert f"{14 + num_contexts} of {14 + num_contexts} plans pass" in (tmp_path / "matrix.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.slow
def test_every_plan_that_divides_experts_passes(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(tomli_w.dumps(small_run(str(corpus), model="mixtral")), encoding="utf-8")
    options = ("--all", "--nproc", "2", "--steps", "3", "--json")
    done = weft_command("verify", "run.toml", *options, cwd=tmp_path, cache=tmp_path / "cache", patience_s=900)
    assert done.returncode == 0, done.stderr
    verdicts = json.loads(done.stdout)["verdicts"]
    divided = [verdict["plan"] for verdict in verdicts if "ep 2 by" in verdict["plan"]]
    assert [name.partition("ep 2 by ")[2].partition(",")[0] for name in divided] == ["pairs", "tokens", "gather"]
    assert all(verdict["ok"] for verdict in verdicts)
