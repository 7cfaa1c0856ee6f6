"""Time from kill -9 of a random rank to the next finished step, by stage; the end is compared with a run without kills.

    python benchmarks/recovery.py --kills 20 --out benchmarks/results/recovery-DATE.md

`weft train --max-restarts` of a small model on two ranks; a rank is killed at a random moment, again and again. Each
mode is a run of its own: copies in memory, checkpoints on disk, and ranks that start by their command, as they did
before they were forked. Losses and last checkpoint are compared with a run that nobody kills. The load average at each
kill is reported, since other work on the same cores is part of these times.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from weft.checkpoint import peek_newest, read_tensors
from weft.core.errors import WeftError
from weft.core.run_spec import RunSpec
from weft.launch.agent import RankAgent
from weft.launch.local import launch
from weft.train.job import Job, imports_of

MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
MODES: dict[str, tuple[dict[str, int], bool]] = {  # settings of [checkpoint], ranks are forked
    "copies in memory every step": ({"memory_every": 1, "every": 1000}, True),
    "checkpoints every 10 steps": ({"memory_every": 0, "every": 10}, True),
    "checkpoints every 10 steps, ranks not forked": ({"memory_every": 0, "every": 10}, False),
}
STAGES = ("detection", "end of peers", "start of ranks", "join", "model and state", "first new step")


class Trial:
    """A run that is killed now and then; the moments of each recovery."""

    def __init__(self, folder: Path, given: argparse.Namespace, checkpoint: dict[str, int], *, forked: bool) -> None:
        self.out, self.scratch, self._given, self._forked = folder / "run", folder / "ranks", given, forked
        tables = {
            "model": {"type": "qwen3", "config": MODEL},
            "data": {"tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": given.steps, "global_batch": 4},
            "checkpoint": checkpoint,
            "logging": {"tensorboard": False},
            "evaluation": {"every": 0},
            "ledger": {"dry_run": False, "measure": False},
        }
        plan = {"mesh": {"dp_shard": given.ranks}, "data_parallel": {"zero": 3}}
        self._run = RunSpec.from_tables(tables)
        job = Job.create(run=self._run, plan_tables=plan, num_ranks=given.ranks, out=self.out, device="cpu")
        folder.mkdir(parents=True)
        self._job = folder / "job.json"
        self._job.write_text(job.to_json(), encoding="utf-8")
        self._copied = checkpoint["memory_every"] > 0
        self.moments: dict[str, float] = {}  # of the recovery in progress
        self.rows: list[dict[str, float]] = []
        self.lost: list[int] = []  # finished steps that a recovery repeats
        self._resumed: list[tuple[float, int]] = []  # when a line said so, from which step
        self._is_over = False

    def run(self, kills: int) -> None:
        """Until the run has finished."""
        killer = threading.Thread(target=self._kill_all, args=(kills,), daemon=True)
        with _stamped_output(self._read_line), _wrapped(self.moments):
            killer.start()
            try:
                launch(
                    [sys.executable, "-m", "weft.train", str(self._job)],
                    num_ranks=self._given.ranks,
                    scratch=self.scratch,
                    max_restarts=kills,
                    log=lambda line: None,
                    imports=imports_of(self._run) if self._forked else (),
                    memory_copies=self._copied,
                )
            finally:
                self._is_over = True
                killer.join(5)

    def outcome(self) -> tuple[list[float], str]:
        """All losses, and the digest of the last checkpoint."""
        losses = [json.loads(line)["loss"] for line in self._lines()]
        newest = peek_newest(self.out / "checkpoints")
        digest = hashlib.sha256()
        for key, value in sorted(read_tensors(newest.path)) if newest is not None else ():
            digest.update(key.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return losses, digest.hexdigest()

    def _kill_all(self, kills: int) -> None:
        draw = random.Random(kills)
        for generation in range(kills):
            pids = [self.scratch / f"generation-{generation}/pid-{rank}" for rank in range(self._given.ranks)]
            first = self._last_step() if generation else 10  # there is a checkpoint
            self._wait(lambda first=first: self._last_step() > first)  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 1.0))
            if self._is_over:
                return
            self.moments.clear()
            last, load = self._last_step(), os.getloadavg()[0]
            killed = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(draw.choice(pids).read_text()), signal.SIGKILL)
            self._wait(lambda: len(self._resumed) > generation)  # noqa: B023
            self._wait(lambda: self._last_step() > last)  # noqa: B023
            ended = time.time()
            if self._is_over:
                return
            pids = [self.scratch / f"generation-{generation + 1}/pid-{rank}" for rank in range(self._given.ranks)]
            joined, joined_pids = max(pid.stat().st_mtime for pid in pids), [int(pid.read_text()) for pid in pids]
            resumed, step = self._resumed[generation]
            self.lost.append(last - step)
            at = [killed, *(self.moments[name] for name in STAGES[:3]), joined, resumed, ended]
            row = {name: after - before for name, before, after in zip(STAGES, at, at[1:], strict=False)}
            self.rows.append({**row, "total": ended - killed, "processor": _processor_s(joined_pids), "load": load})
            print(json.dumps({name: round(value, 3) for name, value in self.rows[-1].items()}), flush=True)

    def _read_line(self, moment: float, line: str) -> None:
        if line.startswith("resuming from step "):
            self._resumed.append((moment, int(line.split()[3])))

    def _lines(self) -> list[str]:
        with contextlib.suppress(OSError):
            return (self.out / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        return []

    def _last_step(self) -> int:
        lines = self._lines()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._is_over:
            time.sleep(0.002)


def _processor_s(pids: list[int]) -> float:
    """Processor time that the ranks have used, per rank: what a recovery takes where nothing else runs."""
    used = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used / len(pids)


class _stamped_output:  # noqa: N801  # used as a function
    """Lines that ranks print, with the time of each, instead of the terminal."""

    def __init__(self, take: Callable[[float, str], None]) -> None:
        self._take = take

    def __enter__(self) -> None:
        reading, writing = os.pipe()
        self._saved = os.dup(2)
        os.dup2(writing, 2)
        os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()

    def __exit__(self, *error: object) -> None:
        os.dup2(self._saved, 2)
        os.close(self._saved)
        self._reader.join(5)

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._take(time.time(), line)


class _wrapped:  # noqa: N801  # used as a function
    """Notes when the agent sees a failure, has ended all ranks, and has started them again."""

    def __init__(self, moments: dict[str, float]) -> None:
        self._moments = moments

    def __enter__(self) -> None:
        self._end, self._start = RankAgent._end_generation, RankAgent._start_workers
        end, start, moments = self._end, self._start, self._moments

        def noted_end(agent: RankAgent) -> Any:
            moments["detection"] = time.time()
            ends = end(agent)
            moments["end of peers"] = time.time()
            return ends

        def noted_start(agent: RankAgent, group: Any) -> Any:
            found = start(agent, group)
            moments["start of ranks"] = time.time()
            return found

        RankAgent._end_generation = noted_end  # type: ignore[method-assign]
        RankAgent._start_workers = noted_start  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        RankAgent._end_generation = self._end  # type: ignore[method-assign]
        RankAgent._start_workers = self._start  # type: ignore[method-assign]


def page(found: dict[str, Trial], wrong: list[str], given: argparse.Namespace) -> str:
    lines = [
        f"# Recovery of a run from kill -9 of a rank, {time.strftime('%Y-%m-%d')}", "",
        f"Caveats: {os.cpu_count()} cores shared with other work, load average at each kill below (1 is one busy core);"
        f" a model of 0.1 M parameters, {given.ranks} ranks of ZeRO-3 over loopback, so copies and loads cost little."
        " The first start, with its imports, is not counted.", "",
        f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}.", "",
        f"    python benchmarks/recovery.py --kills {given.kills}", "",
        "Seconds from the kill to the next finished step that had not been finished before; medians by stage."
        " `processor`: processor time of a restarted rank up to there.", "",
        f"| | kills | median | worst | {' | '.join(STAGES)} | processor | load, median (most)"
        " | finished steps lost, mean (most) |",
        "|" + " --- |" * (len(STAGES) + 7),
    ]  # fmt: skip
    for name, trial in ((name, trial) for name, trial in found.items() if trial.rows):
        totals, loads = [row["total"] for row in trial.rows], [row["load"] for row in trial.rows]
        stages = " | ".join(f"{statistics.median(row[stage] for row in trial.rows):.2f}" for stage in STAGES)
        lines.append(
            f"| {name} | {len(totals)} | **{statistics.median(totals):.2f}** | {max(totals):.2f} | {stages}"
            f" | {statistics.median(row['processor'] for row in trial.rows):.2f}"
            f" | {statistics.median(loads):.1f} ({max(loads):.1f})"
            f" | {statistics.mean(trial.lost):.1f} ({max(trial.lost)}) |"
        )
    same = (
        "Every run ends with the losses of all steps and the bytes of the last checkpoint of a run that nobody kills."
    )
    lines += ["", *(wrong or [same]), ""]
    return "\n".join(lines)


def main() -> int:
    given = _arguments()
    found: dict[str, Trial] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="weft-recovery-") as folder:
        whole = Trial(Path(folder) / "whole", given, {"memory_every": 0, "every": 1000}, forked=True)
        whole.run(0)
        for number, (name, (checkpoint, forked)) in enumerate(MODES.items()):
            kills = given.kills if forked else given.cold_kills
            if not kills or (given.only and given.only not in name):
                continue
            print(name, flush=True)
            trial = found[name] = Trial(Path(folder) / f"mode-{number}", given, checkpoint, forked=forked)
            try:
                trial.run(kills)
            except WeftError as error:
                wrong.append(f"{name}: {error.message}")
            if len(trial.rows) < kills:
                wrong.append(f"{name}: the run ended after {len(trial.rows)} of {kills} kills; give more --steps")
            if trial.outcome() != whole.outcome():
                wrong.append(f"{name}: it ends with other losses or weights")
    text = page(found, wrong, given)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cold-kills", type=int, default=5, help="of ranks that are not forked")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", default="", help="part of a mode's name")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
