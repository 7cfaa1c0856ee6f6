"""The batch script: its text, and what it does, run by bash with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from weft.launch.places.request import LaunchRequest
from weft.launch.places.settings import LaunchSettings
from weft.launch.places.slurm import write_slurm

GOLDEN = Path(__file__).with_name("golden") / "slurm.sbatch"
SITE = {
    "job": {"python": "python3", "environment": {"NCCL_DEBUG": "WARN", "NOTE": "it's two words"}},
    "slurm": {
        "partition": "gpu",
        "account": "team",
        "time": "04:00:00",
        "gpu_type": "h100",
        "cpus_per_rank": 6,
        "setup": ["module load cuda"],
        "options": ["--mail-type=END"],
    },
}
REQUEST = LaunchRequest(
    verb=("train",),
    arguments=("run.toml", "--plan", "plan.toml", "--set", "data.source=my texts"),
    name="big",
    nodes=2,
    ranks_per_node=8,
    on_gpus=True,
    folder=Path("/shared/project"),
    settings=LaunchSettings.from_tables(SITE),
)
SWEEP = (("--set", "train.seed=1"), ("--set", "data.source=a b"))
# Stand-ins: each writes its arguments into `calls`.
STANDINS = {
    "srun": 'echo "srun $*" >> calls; printf "%s\\n" "$@" > words; eval "${SRUN:-true}"',
    "scontrol": """echo "scontrol $*" >> calls
case "$1 $2" in
    "show hostnames") printf "nowhere-1\\nnowhere-2\\n" ;;
    "show node") echo "   NodeAddr=${ADDRESS:-} NodeHostName=nowhere-1" ;;
esac""",
    "scancel": 'echo "scancel $*" >> calls; touch stopped',
    "hostname": "true",
}


def script_of(request: LaunchRequest = REQUEST) -> str:
    (file,) = write_slurm(request)
    return file.text


def test_the_script_is_the_golden_one() -> None:
    assert script_of() == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, variants=SWEEP, out="/runs/my sweep"),
        replace(REQUEST, verb=("verify",), nodes=1),
        replace(REQUEST, verb=("server", "train"), arguments=(), nodes=1, on_gpus=False),
        replace(REQUEST, settings=LaunchSettings.from_tables({"slurm": {"requeue": False}})),
    ],
)
def test_bash_parses_every_script(request_: LaunchRequest) -> None:
    done = subprocess.run(["bash", "-n"], input=script_of(request_), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "__" not in script_of(request_)


class Standins:
    """A folder in which the script runs; `calls` are those of Slurm's programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, body in STANDINS.items():
            path = programs / name
            path.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
            path.chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "nowhere-[1-2]",
            "ADDRESS": "10.9.8.7",
        }

    def start(self, request: LaunchRequest, **variables: str) -> subprocess.Popen[str]:
        (self.folder / "job.sbatch").write_text(script_of(request), encoding="utf-8")
        return subprocess.Popen(
            ["bash", "job.sbatch"],
            cwd=self.folder,
            env={**self.environment, **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, request: LaunchRequest, **variables: str) -> tuple[int, str]:
        process = self.start(request, **variables)
        _, err = process.communicate(timeout=30)
        return process.returncode, err

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    @property
    def words(self) -> list[str]:
        """The arguments of srun."""
        return (self.folder / "words").read_text(encoding="utf-8").splitlines()


@pytest.fixture
def slurm(tmp_path: Path) -> Standins:
    return Standins(tmp_path)


PLAIN = replace(REQUEST, settings=LaunchSettings())


def test_ranks_meet_at_the_address_that_slurm_knows_and_their_exit_code_is_the_jobs(slurm: Standins) -> None:
    code, err = slurm.run(PLAIN, SRUN="exit 2")
    assert code == 2, err
    words = slurm.words
    assert words[words.index("--address") + 1] == "10.9.8.7"
    assert words[words.index("--nodes") + 1] == "2"
    assert words[words.index("--out") + 1] == "runs/big-77"
    assert words[-1] == "--continue"
    assert "data.source=my texts" in words  # one word


def test_a_node_without_an_address_is_named_at_once(slurm: Standins) -> None:
    code, err = slurm.run(PLAIN, ADDRESS="nowhere-1")
    assert code == 2
    assert "node nowhere-1 has no address" in err
    assert not any(call.startswith("srun") for call in slurm.calls)


def test_an_element_of_a_sweep_has_its_own_arguments_and_folder(slurm: Standins) -> None:
    request = replace(PLAIN, variants=SWEEP, out="/runs/my sweep")
    code, err = slurm.run(request, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_JOB_ID="70")
    assert code == 0, err
    assert slurm.words[-5:] == ["--set", "data.source=a b", "--out", "/runs/my sweep/1", "--continue"]
    assert "--array=0-1" in script_of(request)


# The ranks save within the step that the signal finds them in, then end; `stopped` is what scancel leaves.
_SAVES = "until [ -e stopped ]; do sleep 0.05; done; mkdir -p runs/big-77/checkpoints/step-00000007; exit 1"
_SAVES_NOTHING = "until [ -e stopped ]; do sleep 0.05; done; exit 1"


@pytest.mark.parametrize(
    ("ranks", "requeue", "code", "is_queued"),
    [(_SAVES, True, 0, True), (_SAVES_NOTHING, True, 3, False), (_SAVES, False, 0, False)],
    ids=["saved", "not saved", "not to be queued"],
)
def test_before_the_time_limit_ranks_save_and_the_job_is_queued_again_if_it_got_further(
    ranks: str, requeue: bool, code: int, is_queued: bool, slurm: Standins
) -> None:
    (slurm.folder / "runs/big-77/checkpoints/step-00000003").mkdir(parents=True)
    settings = LaunchSettings.from_tables({"slurm": {"requeue": requeue}})
    process = slurm.start(replace(PLAIN, settings=settings), SRUN=ranks)
    deadline = time.monotonic() + 20
    while not any(call.startswith("srun") for call in slurm.calls):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "scancel --signal=TERM 77" in slurm.calls
    assert ("scontrol requeue 77" in slurm.calls) is is_queued
