"""The same rank script under plain torchrun, which knows nothing of us."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

RANK_SCRIPT = Path(__file__).with_name("rank_script.py")


def torchrun(mode: str, folder: Path, *, max_restarts: int) -> subprocess.CompletedProcess[str]:
    options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={max_restarts}"]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(RANK_SCRIPT), mode, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_rank_reports_the_failing_ranks_message(tmp_path: Path) -> None:
    done = torchrun("raise", tmp_path, max_restarts=0)
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("error [")]
    assert told == ["error [W701]: rank 1 failed in step 3: ValueError: boom"] * 2


def wait_for(condition: Callable[[], bool], *, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_rank_outlives_a_killed_agent(tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node=2"]
    agent = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(RANK_SCRIPT), "forever", str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.DEVNULL,
    )
    ranks: list[int] = []
    try:
        files = [tmp_path / "pid-0", tmp_path / "pid-1"]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        ranks = [int(file.read_text()) for file in files]
        agent.kill()
        agent.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in ranks), patience_s=20)
    finally:
        agent.kill()
        agent.wait()
        for pid in filter(is_alive, ranks):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_its_restarts_work_although_it_keeps_one_store(tmp_path: Path) -> None:
    done = torchrun("kill-1", tmp_path, max_restarts=1)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
