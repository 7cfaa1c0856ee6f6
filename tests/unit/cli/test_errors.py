"""Errors as a user meets them: an exit code, one sentence with its code, a hint, no stack trace."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import call_weft, last_step, run_tables, train_here

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.train.folder.run_folder import RunFolder
from weft.train.ranks.process import leave

OWNER = """
import sys
from pathlib import Path
from weft.train.folder.lock import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
input()
"""
TRAIN = ("train", "run.toml", "--out", "run")
# arguments, error code, what the sentence names, what the hint offers
BAD_REQUESTS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "misspelt key": ((*TRAIN, "--set", "train.learning_rat=1"), "W102", "'learning_rat'", "'learning_rate'"),
    "misspelt section": ((*TRAIN, "--set", "trian.steps=1"), "W102", "'trian'", "'train'"),
    "misspelt model key": (
        (*TRAIN, "--set", "model.config.hiden_size=8"),
        "W301",
        "'hiden_size'",
        "'hidden_size'",
    ),
    "not section.key=value": ((*TRAIN, "--set", "steps"), "W103", "'steps'", "train.steps=50"),
    "wrong value": ((*TRAIN, "--set", "train.steps=0"), "W103", "train.steps", "at least 1"),
    "unknown model": ((*TRAIN, "--set", "model.type=lama"), "W301", "'lama'", "llama"),
    "unknown option": (("train", "--nprocs", "2"), "W100", "--nprocs", "--help"),
    "no such file": (("train", "none.toml"), "W101", "none.toml", "check the path"),
    "no such data": ((*TRAIN, "--set", "data.source=none.txt"), "W401", "none.txt", ""),
    "indivisible batch": ((*TRAIN, "--nproc", "3"), "W203", "global batch of 8", "6 or 9"),
    "indivisible micro-batches": ((*TRAIN, "--set", "pipeline.microbatches=3"), "W203", "3 micro-batches", "6 or 9"),
    "mesh against ranks": (
        (*TRAIN, "--nproc", "2", "--set", "mesh.dp_shard=4", "--set", "data_parallel.zero=3"),
        "W202",
        "4 ranks",
        "--nproc 4",
    ),
    "plan against itself": (
        (*TRAIN, "--set", "mesh.dp_shard=2", "--set", "data_parallel.zero=0"),
        "W201",
        "zero = 0",
        "dp_replicate",
    ),
    "a plan of the future": (
        (*TRAIN, "--set", "data_parallel.strategy=dataparallel", "--set", "activations.policy=full"),
        "W204",
        "activation recompute under dataparallel",
        "docs/status.md",
    ),
    "no GPUs": ((*TRAIN, "--device", "cuda"), "W205", "GPU", "--device cpu"),
    "DataParallel without GPUs": (
        (*TRAIN, "--set", "data_parallel.strategy=dataparallel"),
        "W205",
        "GPU",
        "",
    ),
    "short data": ((*TRAIN, "--set", "data.sequence_length=100000"), "W401", "100000", "sequence_length"),
    "no such frozen parameter": ((*TRAIN, "--set", 'train.frozen=["*.nothing"]'), "W103", "'*.nothing'", "*"),
    "resume of no run": (("train", "--resume", "."), "W501", "not a run folder", "weft train"),
    "resume with an out": (("train", "--resume", ".", "--out", "x"), "W103", "--resume", "--set"),
    "export of no run": (("export", ".", "--out", "hf"), "W501", "not a run folder", "weft train"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_one_sentence_and_a_hint(case: str, here: Path) -> None:
    arguments, error_code, names, hint = BAD_REQUESTS[case]
    code, out, err = call_weft(*arguments)
    assert (code, out) == (2, ""), err
    [sentence] = [line for line in err.splitlines() if line.startswith("error [")]
    assert sentence.startswith(f"error [{error_code}]: ")
    assert names in sentence
    [offer] = [line for line in err.splitlines() if line.startswith("hint: ")]
    assert hint in offer
    assert "Traceback" not in err
    assert not (here / "run").exists()  # else the mended command would find its own folder in the way


@pytest.mark.parametrize(
    "verb",
    [
        ("train", "run.toml", "--out", "run"),
        ("verify", "run.toml"),
        ("dryrun", "run.toml"),
        ("bench", "step", "run.toml"),
        ("launch", "--on", "slurm", "--", "train", "run.toml"),
        ("launch", "--on", "hosts", "--hosts", "a:2,b:1", "--", "train", "run.toml"),
    ],
    ids=lambda verb: " ".join(verb[:3]),
)
def test_every_verb_refuses_what_its_ranks_would(
    verb: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("ranks were started")

    for name in ("weft.launch.local.launch", "weft.cli.dryrun.question.dry_runs", "weft.train.bench.measure_engine"):
        monkeypatch.setattr(name, start)
    uneven = ("mesh.tp=3", "tensor_parallel.sequence_parallel=false")
    code, _, err = call_weft(*verb, *(part for setting in uneven for part in ("--set", setting)))
    assert code == 2
    assert "error [W206]: llama: attention heads must divide over tp" in err
    assert "hint: tp may be 1, 2" in err


@pytest.mark.parametrize("group", [(), ("server",), ("bench",)], ids=["weft", "weft server", "weft bench"])
def test_a_command_without_a_verb_prints_its_help(group: tuple[str, ...]) -> None:
    code, out, err = call_weft(*group)
    assert (code, err) == (0, "")
    assert "Usage: " in out
    assert re.search(r"^(Commands|Train):$", out, re.MULTILINE)  # weft itself groups its verbs


def test_with_json_the_error_is_an_object_on_stdout(here: Path) -> None:
    code, out, err = call_weft("train", "none.toml", "--json")
    found = json.loads(out)
    assert (code, found["code"], found["exit_code"]) == (2, "W101", 2)
    assert f"error [W101]: {found['message']}" in err


def test_an_out_folder_in_the_way_is_left_alone(here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "notes.txt").write_text("mine")
    code, _, err = call_weft(*TRAIN)
    assert code == 2
    assert "error [W501]: " in err
    assert "--out" in err
    assert [path.name for path in (here / "run").iterdir()] == ["notes.txt"]


def test_a_failed_start_is_not_in_the_way_of_the_mended_command(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (*TRAIN, "--set", "train.optimizer=adamw8bit", "--set", "train.steps=1")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchao", None)
        patch.setitem(sys.modules, "torchao.optim", None)
        for _ in range(2):
            code, _, err = call_weft(*command)
            assert code == 2
            assert "error [W403]: " in err
    leave()
    code, _, err = call_weft(*command)
    assert code == 0, err


def test_a_run_that_did_no_step_is_started_again_by_both_ways(here: Path, corpus: Path) -> None:
    spec = RunSpec.from_tables(run_tables(corpus, {"train.steps": 1, "checkpoint.at_end": False}))
    RunFolder(here / "run").create(spec, Plan())
    code, _, err = call_weft(*TRAIN, "--set", "train.steps=1")
    assert code == 0, err
    assert "finished no step; it is reused" in err
    assert last_step(here / "run") == 1

    RunFolder(here / "other").create(spec, Plan())
    code, _, err = call_weft("train", "--resume", "other")
    assert code == 0, err
    assert "starts at step 0" in err
    assert last_step(here / "other") == 1


def test_a_run_that_ended_without_a_checkpoint_cannot_be_resumed(here: Path, corpus: Path) -> None:
    train_here(here / "run", corpus, {"train.steps": 1, "checkpoint.at_end": False})
    code, _, err = call_weft("train", "--resume", "run")
    assert code == 2
    assert "error [W601]: " in err
    assert "another --out" in err
    code, _, err = call_weft(*TRAIN)
    assert code == 2
    assert "--resume" not in err
    code, _, err = call_weft("export", "run", "--out", "hf")
    assert code == 2
    assert "error [W601]: " in err


@pytest.mark.parametrize("arguments", [TRAIN, ("train", "--resume", "run")], ids=["start", "resume"])
def test_a_folder_that_another_process_trains_into_is_refused(
    arguments: tuple[str, ...], here: Path, corpus: Path
) -> None:
    RunFolder(here / "run").create(RunSpec.from_tables(run_tables(corpus)), Plan())
    with subprocess.Popen([sys.executable, "-c", OWNER, str(here / "run")], stdin=-1, stdout=-1, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        before = {path: path.read_bytes() for path in (here / "run").iterdir()}
        code, _, err = call_weft(*arguments)
        assert code == 2
        assert f"error [W502]: pid {owner.pid} on {socket.gethostname()} is training into" in err
        assert {path: path.read_bytes() for path in (here / "run").iterdir()} == before
        owner.kill()
    code, _, err = call_weft(*arguments, "--set", "train.steps=1")
    assert code == 0, err
    assert f"the lock of pid {owner.pid}" in err
    assert "was taken over: that process is gone" in err
    assert not (here / "run" / "run.lock").exists()


def test_numbers_that_are_not_finite_end_the_run_with_three(here: Path) -> None:
    code, _, err = call_weft(*TRAIN, "--set", "train.learning_rate=1e30", "--set", "train.warmup_steps=0")
    assert code == 3
    assert "error [W702]: " in err
    assert "learning_rate" in err
    assert "Traceback" not in err
