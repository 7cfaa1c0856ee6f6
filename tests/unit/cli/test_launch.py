"""`weft launch`: what it prints and hands over, and what it refuses before anything is queued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tiny_run import call_weft, last_step

TRAIN = ("train", "run.toml", "--plan", "plan.toml")
# options of the launch, the verb, error code, what the sentence names, what the hint offers
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str, str, str]] = {
    "a verb that is not launched": ((), ("plan", "run.toml"), "W103", "'plan'", "train, verify, server train"),
    "no such option of the verb": ((), (*TRAIN, "--plam", "x"), "W100", "--plam", "--help"),
    "no such key of the run": ((), (*TRAIN, "--set", "train.stepz=1"), "W102", "'stepz'", "'steps'"),
    "no such section of the site": (("--set", "slrum.time=1"), TRAIN, "W102", "'slrum'", "'slurm'"),
    "no such key of the site": (("--set", "slurm.partion=x"), TRAIN, "W102", "'partion'", "'partition'"),
    "a time that is none": (("--set", "slurm.time=soon"), TRAIN, "W103", "slurm.time", "--time"),
    "ranks that do not divide": (("--nodes", "3"), TRAIN, "W202", "4 ranks", "--nodes 2 --ranks-per-node 2"),
    "sizes that contradict": (("--nodes", "2", "--ranks-per-node", "4"), TRAIN, "W202", "2 nodes of 4", "--nodes 1"),
    "an illegal plan": ((), (*TRAIN, "--set", "train.global_batch=7"), "W203", "global batch of 7", "4 or 8"),
    "an illegal plan of a sweep": (("--sweep", "train.global_batch=8,7"), TRAIN, "W203", "global batch of 7", "4 or 8"),
    "a sweep of nothing": (("--sweep", "steps=1"), TRAIN, "W103", "'steps=1'", "train.learning_rate"),
    "a sweep without a queue": (("--on", "local", "--sweep", "train.seed=1,2"), TRAIN, "W103", "local", "slurm"),
    "verify on two nodes": (("--nodes", "2"), ("verify", *TRAIN[1:]), "W103", "`weft verify`", "--nodes 1"),
    "servers on two nodes": (("--nodes", "3"), ("server", "train"), "W103", "`weft server train`", "--on ray"),
    "no hosts": (("--on", "hosts"), TRAIN, "W103", "no hosts", "--hosts gpu1:8"),
    "a host without ranks": (("--on", "hosts", "--hosts", "a,b:2"), TRAIN, "W103", "a has no number", "a:8"),
    "verify on hosts": (
        ("--on", "hosts", "--hosts", "a:4"),
        ("verify", *TRAIN[1:]),
        "W103",
        "`weft train` only",
        "--on",
    ),
    "too few ranks on hosts": (("--on", "hosts", "--hosts", "a:2"), TRAIN, "W202", "4 ranks", "--nproc 4"),
    "a resume": ((), ("train", "--resume", "runs/a"), "W103", "--resume", "train runs/a/run.toml"),
    "no such file": ((), ("train", "none.toml"), "W101", "none.toml", "check the path"),
}


@pytest.fixture
def project(here: Path) -> Path:
    (here / "plan.toml").write_text("[mesh]\ndp_shard = 4\n[data_parallel]\nzero = 3\n", encoding="utf-8")
    return here


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_launch_is_one_sentence_and_a_hint(case: str, project: Path) -> None:
    options, words, error_code, names, hint = REFUSED[case]
    code, out, err = call_weft("launch", "--on", "slurm", *options, "--", *words)
    assert (code, out) == (2, ""), err
    sentence, offer = err.splitlines()
    assert sentence.startswith(f"error [{error_code}]: ")
    assert names in sentence
    assert hint in offer


def test_what_is_printed_is_what_json_has_and_what_is_written(project: Path) -> None:
    command = ("launch", "--on", "slurm", "--nodes", "2", "--name", "My Run!", "--write", "files")
    code, out, err = call_weft(*command[:-2], *TRAIN)  # without `--` too: the verb ends the options
    assert code == 0, err
    assert "not submitted" in err
    code, answer, _ = call_weft(*command, "--json", "--", *TRAIN)
    fields = json.loads(answer)
    assert fields == {
        "on": "slurm",
        "files": [{"name": "my-run.sbatch", "text": out}],
        "submitted": False,
        "id": None,
    }
    assert (project / "files" / "my-run.sbatch").read_text(encoding="utf-8") == out
    assert "--ranks 2" in out
    assert f"#SBATCH --chdir={project}" in out


def test_the_site_is_a_file_and_options_change_it(project: Path) -> None:
    (project / "launch.toml").write_text('[slurm]\npartition = "cpu"\ntime = "10"\n', encoding="utf-8")
    options = ("--settings", "launch.toml", "--set", "slurm.time=20")
    code, out, err = call_weft("launch", "--on", "slurm", *options, "--", *TRAIN, "--device", "cpu")
    assert code == 0, err
    assert "#SBATCH --partition=cpu" in out
    assert "#SBATCH --time=20" in out
    assert "--gpus" not in out


def test_without_a_mesh_the_options_say_how_many_ranks(project: Path) -> None:
    code, out, err = call_weft("launch", "--on", "slurm", "--nodes", "2", "--ranks-per-node", "4", "--", *TRAIN[:2])
    assert code == 0, err
    assert "--nodes 2 --ranks 4" in out


@pytest.mark.parametrize(
    ("program", "sentence"),
    [(None, "there is no sbatch"), ("echo 'sbatch: error: no such partition' >&2; exit 1", "no such partition")],
)
def test_a_place_that_is_not_there_or_refuses_is_named(
    program: str | None, sentence: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(project, "sbatch", program, monkeypatch)
    code, _, err = call_weft("launch", "--on", "slurm", "--submit", "--", *TRAIN)
    assert code == 2
    assert "error [W901]: " in err
    assert sentence in err
    assert "hint: " in err


def standin(folder: Path, name: str, body: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of this body is the only one on the path, besides the shell's."""
    programs = folder / "programs"
    programs.mkdir()
    if body is not None:
        (programs / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    for needed in ("bash", "cat"):
        (programs / needed).symlink_to(f"/bin/{needed}")
    monkeypatch.setenv("PATH", str(programs))


def test_submitted_the_script_goes_to_sbatch_and_its_number_comes_back(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(project, "sbatch", 'cat > got; echo "$*" > arguments; echo "4711;cluster"', monkeypatch)
    code, answer, err = call_weft("launch", "--on", "slurm", "--submit", "--json", "--", *TRAIN)
    assert code == 0, err
    fields = json.loads(answer)
    assert (fields["submitted"], fields["id"]) == (True, "4711")
    assert (project / "got").read_text(encoding="utf-8") == fields["files"][0]["text"]
    assert (project / "arguments").read_text(encoding="utf-8") == "--parsable\n"


def test_manifests_go_to_kubectl_and_the_names_of_its_objects_come_back(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin(project, "kubectl", 'cat > got; echo "$*" > arguments; printf "configmap/run\\njobset/run\\n"', monkeypatch)
    site = ("kubernetes.image=weft:1", "kubernetes.volumes.runs.claim=runs", "kubernetes.volumes.runs.path=/runs")
    options = [word for setting in site for word in ("--set", setting)]
    code, answer, err = call_weft("launch", "--on", "kubernetes", *options, "--submit", "--json", "--", *TRAIN)
    assert code == 0, err
    fields = json.loads(answer)
    assert (fields["on"], fields["id"]) == ("kubernetes", "configmap/run jobset/run")
    assert (project / "got").read_text(encoding="utf-8") == fields["files"][0]["text"]
    assert (project / "arguments").read_text(encoding="utf-8") == "apply --output=name --filename=-\n"


def test_on_this_machine_it_is_the_verb_itself(project: Path) -> None:
    words = ("train", "run.toml", "--device", "cpu", "--set", "train.steps=2", "--out", "run", "--nproc", "1")
    code, out, err = call_weft("launch", "--", *words)
    assert code == 0, err
    assert out == "weft train run.toml --set train.steps=2 --device cpu --nproc 1 --out run\n"
    code, answer, err = call_weft("launch", "--submit", "--json", "--", *words)
    assert code == 0, err
    assert (json.loads(answer)["on"], json.loads(answer)["submitted"]) == ("local", True)
    assert last_step(project / "run") == 2


def test_a_failure_here_is_the_verbs_own(project: Path) -> None:
    (project / "taken").write_text("mine", encoding="utf-8")
    code, out, err = call_weft("launch", "--submit", "--", "train", "run.toml", "--device", "cpu", "--out", "taken")
    assert (code, out) == (2, "")
    assert "error [W501]: " in err


def test_printing_imports_no_torch(project: Path) -> None:
    script = (
        "import sys; from weft.cli.main import app\n"
        f"app(['launch', '--on', 'slurm', '--', *{TRAIN!r}], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hosts_print_the_commands_that_they_run(project: Path) -> None:
    (project / "hosts").write_text("gpu1 3\ngpu2:1  # small\n", encoding="utf-8")
    options = ("--on", "hosts", "--hosts", "hosts", "--set", "hosts.ssh_options=['-F', 'my config']")
    code, out, err = call_weft("launch", *options, "--", *TRAIN, "--out", "runs/big")
    assert code == 0, err
    first, *lines = out.splitlines()
    assert first.endswith("-m weft train run.toml --plan plan.toml --out runs/big")
    assert [line for line in lines if line.startswith("#")] == ["# ranks 0 to 2", "# ranks 3 to 3"]
    assert "-F 'my config'" in lines[1]
    assert " gpu1 'cd " in lines[1]
    assert lines[1].endswith("-m weft.launch.host_agent'")


def test_ranks_that_fit_the_plan_are_known_before_a_host_is_lost(project: Path) -> None:
    from weft.cli.launch.hosts import hosts_request
    from weft.cli.launch.inner import parse_inner
    from weft.cli.main import app
    from weft.launch.places.settings import LaunchSettings

    words = [*TRAIN, "--set", "data_parallel.elastic=true", "--max-restarts", "2", "--out", "x"]
    inner = parse_inner(typer.main.get_command(app), words)
    request = hosts_request(inner, "a:2,b:2", ranks_per_node=None, settings=LaunchSettings())
    assert request.fit is not None
    assert [request.fit(limit) for limit in (4, 3, 1)] == [4, 2, 1]
    assert (request.max_restarts, request.min_hosts, str(request.folder)) == (2, None, "x")
