"""`weft server` as a user meets it: bad input is one sentence, a code and a hint; `--json` is JSON on stdout alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import call_weft

from weft.core.server_spec import ServerRun

RUN = """
[model]
kind = "logistic"
[data]
samples = 300
vocabulary = 20
categorical = 2
numeric = 0
[train]
steps = 2
global_batch = 8
[server]
launcher = "in_process"
[logging]
tensorboard = false
"""
TRAIN = ("server", "train", "run.toml", "--out", "run")
# arguments, error code, what the sentence names, what the hint offers
BAD_REQUESTS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "misspelt section": ((*TRAIN, "--set", "sever.workers=1"), "W102", "'sever'", "'server'"),
    "a section of plans": ((*TRAIN, "--set", "mesh.tp=2"), "W102", "'mesh'", "sections: model"),
    "misspelt key": ((*TRAIN, "--set", "server.worker=1"), "W102", "'worker'", "'workers'"),
    "not section.key=value": ((*TRAIN, "--set", "steps"), "W103", "'steps'", "train.steps=50"),
    "bad mode": ((*TRAIN, "--mode", "fast"), "W103", "server.mode", "sync | async | geo"),
    "negative staleness": ((*TRAIN, "--staleness", "-1"), "W103", "server.staleness", "'free'"),
    "wordy staleness": ((*TRAIN, "--staleness", "soon"), "W103", "server.staleness", "'free'"),
    "bad launcher": ((*TRAIN, "--launcher", "slurm"), "W103", "server.launcher", "processes | ray"),
    "no servers": ((*TRAIN, "--servers", "0"), "W100", "--servers", "--help"),
    "missing file": (("server", "train", "none.toml"), "W101", "none.toml", "check the path"),
    "not TOML": (("server", "train", "broken.toml"), "W101", "broken.toml", "brackets"),
    "missing data": ((*TRAIN, "--set", "data.source=none.csv"), "W401", "none.csv", "parquet"),
    "no such factory": ((*TRAIN, "--set", "model.factory=no_such:build"), "W301", "'no_such:build'", "module:function"),
    "a folder in the way": (("server", "train", "run.toml", "--out", "full"), "W501", "full", ""),
    "resume of no run": (("server", "train", "--resume", "none"), "W501", "not a run folder", "the folder of a run"),
    "resume of a run that never began": (("server", "train", "--resume", "bare"), "W501", "no servers", "a run wrote"),
    "resume with an out": (("server", "train", "--resume", "bare", "--out", "x"), "W103", "--resume", "--set"),
    "status of no run": (("server", "status", "none"), "W501", "not the folder of a run on servers", "a run wrote"),
    "export of no run": (("server", "export", "none", "--out", "x"), "W501", "run.toml", "a run wrote"),
    "join of no run": (("server", "join", "bare"), "W501", "no run is going on", "weft server train"),
    "unknown verb": (("server", "trian"), "W100", "trian", "--help"),
    "verify with a plan": (("verify", "run.toml", "--plan", "plan.toml"), "W103", "--plan", "leave them out"),
    "verify with ranks": (("verify", "run.toml", "--nproc", "2"), "W103", "--nproc", "leave them out"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a run.toml, one that is no TOML, a folder that is not empty, a run that never began."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    for name in ("full", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "run.toml").write_text(RUN, encoding="utf-8")
    (tmp_path / "broken.toml").write_text("[server\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_one_sentence_and_a_hint(case: str, here: Path) -> None:
    arguments, error_code, names, hint = BAD_REQUESTS[case]
    code, out, err = call_weft(*arguments)
    assert (code, out) == (2, ""), err
    sentence, *hints = err.splitlines()
    assert sentence.startswith(f"error [{error_code}]: "), err
    assert names in sentence
    assert [line for line in hints if line.startswith("hint: ") and hint in line], err
    assert len(hints) == 1, err
    assert not (here / "run" / "live.json").exists()


def test_an_error_is_json_where_that_was_asked_for(here: Path) -> None:
    code, out, _ = call_weft(*TRAIN, "--mode", "fast", "--json")
    told = json.loads(out)
    assert (code, told["code"], told["exit_code"]) == (2, "W103", 2)


def test_a_run_its_status_and_its_tables_as_json(here: Path) -> None:
    code, out, err = call_weft(*TRAIN, "--workers", "1", "--json")
    assert code == 0, err
    ledger = json.loads(out)
    assert (ledger["kind"], ledger["run"]["status"], ledger["run"]["steps"]) == ("server", "finished", 2)
    assert "finished at step 2" in err
    assert "run/report.html" in err

    code, out, _ = call_weft("server", "status", "run", "--json")
    status = json.loads(out)
    assert (code, status["is_live"], status["steps"], len(status["servers"])) == (0, False, 2, 1)
    code, out, err = call_weft("server", "status", "run")
    assert (code, out) == (0, "")
    assert "run: not running, step 2" in err

    code, out, _ = call_weft("server", "export", "run", "--out", "tables", "--json")
    assert code == 0
    assert json.loads(out)["tables"]["embedding"]["rows"] > 0
    assert call_weft("server", "export", "run", "--out", "tables")[0] == 2, "nothing is written over"


def test_a_key_that_is_left_out_keeps_the_default_of_its_table() -> None:
    """A learning rate alone must not make the dense parameters' adam an adagrad."""
    run = ServerRun.from_tables(
        {"dense": {"optimizer": {"learning_rate": 0.1}}, "sparse": {"optimizer": {"kind": "ftrl"}}}
    )
    assert (run.dense.optimizer.kind, run.dense.optimizer.learning_rate) == ("adam", 0.1)
    assert (run.sparse.optimizer.kind, run.sparse.optimizer.learning_rate) == ("ftrl", 0.06)
