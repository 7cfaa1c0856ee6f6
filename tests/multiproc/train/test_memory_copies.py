"""Runs whose ranks are killed again and again and continue from copies in memory: the curve and bytes of a run that
nobody kills, and no step lost that every rank had copied."""

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from gloo_ranks import run_ranks
from tiny_run import Settings, curve, last_step, run_tables, state_digest, train_here

from weft.core.run_spec import RunSpec
from weft.launch.local import launch
from weft.train.job import Job

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies in memory are for Linux")

COPIES = {"checkpoint.memory_every": 1, "evaluation.every": 0, "ledger.measure": False}
DDP = {"mesh": {"dp_replicate": 2}}
LAYOUTS: dict[str, Settings] = {
    "zero 3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4}},
}


def straight(rank: int, num_ranks: int, out: str, corpus: str, settings: Settings, plan: Settings, cache: str) -> None:
    os.environ["XDG_CACHE_HOME"] = cache
    train_here(Path(out), Path(corpus), settings, plan=plan)


class Killer:
    """Kills a rank once training has gone on for a while, `kills` times; notes the last step recorded before each.

    Each time after a new step, and not before step 2: then every rank has a copy."""

    def __init__(self, run: Path, scratch: Path, *, kills: int, seed: int) -> None:
        self._run, self._scratch, self._draw = run, scratch, random.Random(seed)
        self.last_steps: list[int] = []
        self._thread = threading.Thread(target=self._kill_all, args=(kills,), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()

    def _kill_all(self, kills: int) -> None:
        for generation in range(kills):
            files = [self._scratch / f"generation-{generation}/pid-{rank}" for rank in range(2)]
            begun = last_step(self._run) + self._draw.choice([1, 1, 2, 3])
            deadline = time.monotonic() + 100
            while not all(file.exists() and file.read_text() for file in files) or last_step(self._run) < max(begun, 2):
                if time.monotonic() > deadline:
                    return
                time.sleep(0.002)
            time.sleep(self._draw.uniform(0, 0.05))
            self.last_steps.append(last_step(self._run))
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._draw.choice(files).read_text()), signal.SIGKILL)


def require_nothing_lost(
    folder: Path,
    corpus: Path,
    cache: Path,
    plan: Settings,
    capfd: pytest.CaptureFixture[str],
    *,
    steps: int,
    kills: int,
) -> None:
    settings = {**COPIES, "train.steps": steps}
    without = {**settings, "checkpoint.memory_every": 0}
    run_ranks(straight, 2, str(folder / "straight"), str(corpus), without, plan, str(cache))
    run = RunSpec.from_tables(run_tables(corpus, settings))
    out, scratch = folder / "killed", folder / "ranks"
    job = Job.create(run=run, plan_tables=plan, num_ranks=2, out=out, device="cpu")
    (folder / "job.json").write_text(job.to_json())
    capfd.readouterr()
    killer = Killer(out, scratch, kills=kills, seed=kills)
    launch(
        [sys.executable, "-m", "weft.train", str(folder / "job.json")],
        num_ranks=2,
        scratch=scratch,
        max_restarts=kills,
        imports=["weft.train.worker"],
        memory_copies=True,
    )
    killer.join()
    printed = capfd.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line.startswith("resuming from step ")]
    assert len(killer.last_steps) == kills
    begun = [int(line.split()[3]) for line in lines if line.endswith("(copies in memory)")]
    assert len(begun) == kills
    # A rank that has recorded step t has seen every rank's copy of t - 1.
    assert all(begin >= last - 1 for begin, last in zip(begun, killer.last_steps, strict=True))
    assert curve(out) == curve(folder / "straight")
    assert state_digest(out) == state_digest(folder / "straight")


def test_a_killed_rank_costs_no_copied_step(
    tmp_path: Path, corpus: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    require_nothing_lost(tmp_path, corpus, cache, DDP, capfd, steps=24, kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_continues_bit_by_bit(
    name: str,
    tmp_path: Path,
    corpus: Path,
    cache: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    require_nothing_lost(tmp_path, corpus, cache, LAYOUTS[name], capfd, steps=80, kills=4)


@pytest.mark.slow
def test_twenty_random_kills_lose_no_copied_step(
    tmp_path: Path, corpus: Path, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    require_nothing_lost(tmp_path, corpus, cache, LAYOUTS["zero 3"], capfd, steps=400, kills=20)
