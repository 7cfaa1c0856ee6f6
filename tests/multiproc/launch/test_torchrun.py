"""The same rank script under plain torchrun, which knows nothing of us."""

import os
import subprocess
import sys
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


@pytest.mark.slow
def test_its_restarts_work_although_it_keeps_one_store(tmp_path: Path) -> None:
    done = torchrun("kill-1", tmp_path, max_restarts=1)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"done-{rank}").read_text() for rank in (0, 1)] == ["1", "1"]
