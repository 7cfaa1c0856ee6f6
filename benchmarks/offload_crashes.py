"""kill -9 at random moments of a run with states in files, until it has finished: no committed step may be lost.

    python benchmarks/offload_crashes.py --kills 100 --out benchmarks/results/offload_crashes-DATE.md

A run with offload.optimizer = "nvme" and offload.durable = "step" is started, killed with all its ranks or with one of
them first, and resumed, again and again. After each kill the commit records on the disk say which step all ranks have
committed; the resume must begin there, or at a later checkpoint. The losses of all steps and the bytes of the last
checkpoint must equal those of the same run that nobody killed. Processes are forked from this one, after its imports.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch

from weft.checkpoint import peek_newest, read_tensors
from weft.core import offload_sizes
from weft.core.run_spec import RunSpec
from weft.train.job import Job
from weft.train.worker import run_job

EARLY, MOST_S = 0.1, 2.5  # share of kills that may come before training begins; the latest kill after that
CHUNK_ELEMENTS = 16384  # several chunks of a tiny model
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "float32, updated on the host": {"offload": {"update": "host"}},
    "bf16, masters in the files, updated on the device": {
        "offload": {"update": "device"},
        "precision": {"preset": "bf16"},
    },
}


def main() -> int:
    given = _arguments()
    offload_sizes.CHUNK_ELEMENTS = CHUNK_ELEMENTS
    given.folder.mkdir(parents=True, exist_ok=True)
    rows, failures = [], []
    for number, (name, tables) in enumerate(PLANS.items()):
        kills = given.kills // len(PLANS)
        row, wrong = campaign(tables, kills, given, given.folder / f"campaign-{number}", random.Random(number))
        rows.append({"plan": name, **row})
        failures += [f"{name}: {one}" for one in wrong]
        print(json.dumps(rows[-1]), flush=True)
    text = page(rows, failures, given)
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    return int(bool(failures))


def campaign(
    tables: dict[str, Any], kills: int, given: argparse.Namespace, folder: Path, chance: random.Random
) -> tuple[dict[str, Any], list[str]]:
    """Until `kills` kills were made: run, kill, look, resume; each time the run finishes, begin another."""
    whole = Trial(tables, given, folder / "whole")
    whole.finish()
    expected, seen, wrong, runs = whole.outcome(), Counter[str](), [], 0
    while seen["kills"] < kills:
        runs += 1
        trial = Trial(tables, given, folder / f"run-{runs}")
        while True:
            is_done = trial.run_for(None if seen["kills"] >= kills else chance.uniform(0.0, MOST_S), chance)
            wrong += trial.check(seen)
            if is_done:
                break
            seen["kills"] += 1
        if trial.outcome() != expected:
            wrong.append(f"run {runs} ends with other losses or weights")
    found = {key: seen[key] for key in ("kills", "begun at 0", "from files", "from a checkpoint", "of which torn")}
    return {**found, "runs": runs, "steps": given.steps * runs}, wrong


class Trial:
    """One run folder, and what happened to it."""

    def __init__(self, tables: dict[str, Any], given: argparse.Namespace, out: Path) -> None:
        self.out, self.ranks = out, given.ranks
        settings: dict[str, Any] = {
            "mesh": {"dp_shard": given.ranks},
            "data_parallel": {"zero": 2},
            **tables,
            "offload": {"optimizer": "nvme", "durable": "step", **tables["offload"]},
        }
        run = {
            "model": {"type": "qwen3", "config": MODEL},
            "data": {"tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": given.steps, "global_batch": 4},
            "checkpoint": {"every": 9, "keep": 2},
            "logging": {"tensorboard": False},
            "evaluation": {"every": 0},
            "ledger": {"dry_run": False, "measure": False},
        }
        self._spec, self._tables = RunSpec.from_tables(run), settings
        self._committed, self._expected = 0, 0

    def finish(self) -> None:
        if not self.run_for(None, random.Random(0)):
            raise RuntimeError("a run that nobody kills did not finish")

    def run_for(self, seconds: float | None, chance: random.Random) -> bool:
        """Start or resume; kill `seconds` after training began, or now and then before, unless it has finished."""
        self._expected = self._committed
        log = self.out.with_suffix(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        port = _free_port()
        with log.open("a", encoding="utf-8") as file:
            print("--- start", file=file)
        pids = [self._fork(rank, port, log) for rank in range(self.ranks)]
        is_early = chance.random() < EARLY
        deadline = None if seconds is None else time.monotonic() + seconds if is_early else math.inf
        left = dict.fromkeys(pids, True)
        codes: list[int] = []
        while left and (deadline is None or time.monotonic() < deadline):
            codes += _reap(left)
            if deadline == math.inf and seconds is not None and self._begun() is not None:
                deadline = time.monotonic() + seconds
            time.sleep(0.005)
        victims = list(left)
        chance.shuffle(victims)
        for place, pid in enumerate(victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            if place == 0:
                time.sleep(chance.choice([0.0, 0.0, 0.05, 0.3]))  # the others may go on for a while
        while left:
            _reap(left)
            time.sleep(0.002)
        if not victims and any(codes):
            raise RuntimeError(f"a rank failed by itself, see {log}")
        return not victims

    def check(self, seen: Counter[str]) -> list[str]:
        """Compare where the last start began with what was committed before it, and read what is committed now."""
        wrong = []
        begun = self._begun()
        if begun is not None:
            seen["from files" if begun[1] else "from a checkpoint" if begun[0] else "begun at 0"] += 1
            if begun[0] < self._expected:
                wrong.append(f"{self.out.name} began at step {begun[0]}, but {self._expected} was committed")
        steps = [_committed(self.out / "offload", rank) for rank in range(self.ranks)]
        seen["of which torn"] += len({max(one, default=0) for one in steps}) > 1
        newest = peek_newest(self.out / "checkpoints")
        in_files = max(set.intersection(*steps), default=0)
        self._committed = max(in_files, newest.step if newest is not None else 0, self._committed)
        return wrong

    def outcome(self) -> tuple[list[float], str]:
        """All losses, and the digest of the last checkpoint."""
        lines = (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        newest = peek_newest(self.out / "checkpoints")
        digest = hashlib.sha256()
        for key, value in sorted(read_tensors(newest.path)) if newest is not None else ():
            digest.update(key.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return losses, digest.hexdigest()

    def _begun(self) -> tuple[int, bool] | None:
        """The step that the newest start resumed from, and whether from files; None: it did not come so far."""
        log = self.out.with_suffix(".log")
        text = log.read_text(encoding="utf-8").rpartition("--- start")[2] if log.exists() else ""
        if " parameters, " not in text:
            return None
        for line in text.splitlines():
            if line.startswith("resuming from step "):
                return int(line.split()[3]), "states in files" in line
        return 0, False

    def _fork(self, rank: int, port: int, log: Path) -> int:
        pid = os.fork()
        if pid:
            return pid
        with log.open("a", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            code = 1
            try:
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
                here = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in here.items()} if self.ranks > 1 else {})
                can_resume = (self.out / "run.toml").is_file() and (self.out / "plan.toml").is_file()
                job = Job.create(
                    run=self._spec, plan_tables=self._tables, num_ranks=self.ranks, out=self.out, resume=can_resume,
                    device="cpu",
                )  # fmt: skip
                run_job(job)
                code = 0
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            finally:
                sys.stdout.flush()
                os._exit(code)


def _reap(left: dict[int, bool]) -> list[int]:
    codes = []
    for pid in list(left):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            del left[pid]
            codes.append(status)
    return codes


def _committed(folder: Path, rank: int) -> set[int]:
    """The steps that a rank's commit records name."""
    found: set[int] = set()
    for path in folder.glob(f"rank-{rank}-?.json"):
        found |= {step["step"] for step in json.loads(json.loads(path.read_text(encoding="utf-8"))["record"])["steps"]}
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def page(rows: list[dict[str, Any]], failures: list[str], given: argparse.Namespace) -> str:
    keys = list(rows[0])
    table = [f"| {' | '.join(keys)} |", "|" + " --- |" * len(keys)]
    table += [f"| {' | '.join(str(row[key]) for key in keys)} |" for row in rows]
    lines = [
        f"# kill -9 of runs with states in files, {time.strftime('%Y-%m-%d')}", "",
        f"{len(os.sched_getaffinity(0))} cores, torch {torch.__version__}, ext4. {given.ranks} ranks, ZeRO-2,"
        f" {given.steps} steps per run, checkpoints every 9 steps, offload.durable = \"step\".",
        "Moments of the kills are random; one rank is killed first and the other up to 0.3 s later.", "",
        f"    python benchmarks/offload_crashes.py --kills {given.kills}", "", *table, "",
        f"Committed steps lost, and runs that end with other losses or bytes: {len(failures)}.", *failures, "",
        "`of which torn`: kills after which the ranks' newest committed steps differ; both then continue from the"
        " smaller one.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("offload-crashes"), help="scratch, on a local disk")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
