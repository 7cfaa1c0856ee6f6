"""A child ends with the launcher it was told of. Small real processes, without torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

CHILD = """
import os, sys, time
from weft.train.ranks import launcher_death
launcher_death._POLL_S = 0.05
if sys.argv[1] == "kernel":
    launcher_death.end_with_launcher({"WEFT_LAUNCHER_PID": str(os.getppid())})
elif sys.argv[1] == "torchrun":  # as torch elastic starts it: the leader of a session
    os.setsid()
    launcher_death.end_with_launcher({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
elif sys.argv[1] == "torchrun-wrapped":
    launcher_death.end_with_launcher({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"})
elif sys.argv[1] == "slurm":
    launcher_death.end_with_launcher({"SLURM_PROCID": "0", "RANK": "0"})
elif sys.argv[1] == "thread":
    launcher_death.watch_launcher(os.getppid())
else:  # a launcher that is not the parent, as inside a profiler
    launcher_death.end_with_launcher({"WEFT_LAUNCHER_PID": sys.argv[2]})
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_soon(pid: int) -> bool:
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def require_ends_with_its_parent(command: list[str]) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        parent.wait()
        try:
            assert gone_soon(child)
        finally:
            if is_alive(child):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("way", ["kernel", "thread", "torchrun"])
def test_the_child_ends_with_its_parent(way: str) -> None:
    require_ends_with_its_parent([sys.executable, "-c", PARENT, CHILD, way])


def test_a_rank_in_a_wrapper_ends_with_torchruns_agent() -> None:
    agent = """
import subprocess, sys
wrapper = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
subprocess.run([sys.executable, '-c', wrapper, *sys.argv[1:]], start_new_session=True)
"""
    require_ends_with_its_parent([sys.executable, "-c", agent, CHILD, "torchrun-wrapped"])


def test_a_rank_of_slurm_or_of_a_script_outlives_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD, "slurm"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            time.sleep(0.5)  # ten looks
            assert is_alive(child)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_launcher_behind_a_wrapper_is_watched_too() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    command = [sys.executable, "-c", CHILD, "wrapped", str(launcher.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            assert is_alive(child.pid)
            launcher.kill()
            launcher.wait()
            assert child.wait(timeout=20) == -signal.SIGKILL
        finally:
            child.kill()
            launcher.kill()
            launcher.wait()


def test_a_rank_nobody_launched_is_left_alone() -> None:
    from weft.train.ranks.launcher_death import end_with_launcher

    environment = {"RANK": "0"}
    end_with_launcher(environment)
    assert environment == {"RANK": "0"}
