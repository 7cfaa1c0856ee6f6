"""`kill -9` of servers and workers at random while they train, and whether one update was lost or made twice.

    python benchmarks/server_faults.py [--kills 50] [--modes sync async geo] [--seed 0] [--out FOLDER]

A run on child processes (`weft server train`) with the counting task goes on until its children have been killed so
often; then it is interrupted, and a calm run of as many steps is made for comparison. Kills come in four ways:

    training   after a random time                       pair      a server and a worker at once
    again      the one that is just being started again  snapshot  a server that is writing a snapshot

sync must equal the calm run bit by bit, optimizer states and all; async and geo must have every count right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from counting_task import all_records, compare

from weft.core.server_spec import ServerRun

FOLDER = Path(__file__).parent
MAX_STEPS = 1_000_000
WAYS = ("training", "training", "training", "pair", "again", "snapshot")
_PATIENCE_S = 180.0  # kernels may have to be compiled first


def run_tables(mode: str, *, steps: int, **server: Any) -> dict[str, Any]:
    """A power of two for batch and workers: see counting_task.py. Without the discount, which scales updates."""
    return {
        "model": {"embedding_dim": 4, "hidden": [8], "factory": "counting_task:build"},
        "data": {"samples": 50_000, "vocabulary": 2000, "categorical": 8, "numeric": 2},
        "train": {"steps": steps, "global_batch": 64},
        "server": {
            "mode": mode,
            "servers": 2,
            "workers": 2,
            "discount": 0.0,
            "geo_merge": "sum",
            "geo_steps": 4,
            "max_restarts": 10_000,
            **server,
        },
        "sparse": {"optimizer": {"kind": "adagrad", "learning_rate": 0.01}},
        "evaluation": {"every": 200},
        "checkpoint": {"every": 20},
        "logging": {"tensorboard": False},
    }


@dataclass(frozen=True)
class Child:
    pid: int
    role: str  # server | worker
    name: str


class Driver:
    """A run in a process of its own."""

    def __init__(self, out: Path, tables: dict[str, Any]) -> None:
        self.out, self.run = out, ServerRun.from_tables(tables)
        path = out.with_suffix(".toml")
        path.write_text(self.run.to_toml(), encoding="utf-8")
        command = [sys.executable, "-m", "weft.cli.main", "server", "train", str(path), "--out", str(out)]
        self.log = out.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=with_benchmarks())

    def children(self, role: str) -> list[Child]:
        return [child for child in children_of(self.process.pid) if child.role == role]

    @property
    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while self.steps < step and self.process.poll() is None:
            if time.monotonic() > deadline:
                self.process.kill()  # its children end with it
                raise TimeoutError(f"step {step} did not come within {_PATIENCE_S:.0f} s: {self.said()}")
            time.sleep(0.01)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def finish(self, *, timeout_s: float = 120.0) -> dict[str, Any]:
        """Its ledger; raises where it did not end well."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise TimeoutError(f"the run does not end: {self.said()}") from None
        if code:
            raise RuntimeError(f"the run ended with exit code {code}: {self.said()}")
        found: dict[str, Any] = json.loads((self.out / "ledger.json").read_text(encoding="utf-8"))
        return found

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]


def with_benchmarks() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])}


def children_of(pid: int) -> Iterator[Child]:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                command = (entry / "cmdline").read_text().rstrip("\0").split("\0")
                if "weft.server.main" in command:
                    yield Child(int(entry.name), command[-4], command[-1])
        except (FileNotFoundError, ProcessLookupError):
            continue


@dataclass
class Killer:
    driver: Driver
    dice: random.Random
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # (role, way)

    def campaign(self, count: int) -> None:
        while self.kills.total() < count and self.driver.process.poll() is None:
            way = self.dice.choice(WAYS)
            getattr(self, f"_{way}")()
            self._rest()

    def kills_of(self, role: str) -> int:
        return sum(count for (killed, _), count in self.kills.items() if killed == role)

    def kill(self, child: Child, way: str) -> None:
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.kills[child.role, way] += 1

    def _rest(self) -> None:
        """Some kills follow at once, some after a few steps of training."""
        if self.dice.random() < 0.6:
            self.driver.wait_for_step(self.driver.steps + self.dice.randrange(1, 30))
        time.sleep(self.dice.uniform(0.0, 0.3))

    def _any(self, role: str) -> Child | None:
        found = self.driver.children(role)
        return self.dice.choice(found) if found else None

    def _training(self) -> None:
        victim = self._any(self.dice.choice(("server", "worker")))
        if victim is not None:
            self.kill(victim, "training")

    def _pair(self) -> None:
        for victim in (self._any("server"), self._any("worker")):
            if victim is not None:
                self.kill(victim, "pair")

    def _again(self) -> None:
        victim = self._any(self.dice.choice(("server", "server", "worker")))
        if victim is None:
            return
        self.kill(victim, "training")
        successor = self._successor(victim)
        if successor is not None:
            time.sleep(self.dice.uniform(0.0, 1.5))  # imports take most of a second, then it replays its log
            self.kill(successor, "again")

    def _successor(self, victim: Child) -> Child | None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for child in self.driver.children(victim.role):
                if child.name == victim.name and child.pid != victim.pid:
                    return child
            time.sleep(0.005)
        return None

    def _snapshot(self) -> None:
        servers = {child.name: child for child in self.driver.children("server")}
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            for name, child in servers.items():
                folder = self.driver.out / "servers" / name / "snapshots"
                if folder.exists() and any(entry.name.startswith(".draft") for entry in folder.iterdir()):
                    self.kill(child, "snapshot")
                    return


def same_bits(one: Path, other: Path) -> bool:
    mine, theirs = all_records(one), all_records(other)
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def curve(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def run_mode(mode: str, folder: Path, *, kills: int, dice: random.Random) -> dict[str, Any]:
    driver = Driver(folder / f"{mode}-hit", run_tables(mode, steps=MAX_STEPS))
    killer = Killer(driver, dice)
    driver.wait_for_step(5)
    start = time.monotonic()
    killer.campaign(kills)
    seconds = time.monotonic() - start
    driver.wait_for_step(driver.steps + 20)
    driver.interrupt()
    hit = driver.finish()
    steps = hit["run"]["steps"]
    calm_driver = Driver(folder / f"{mode}-calm", run_tables(mode, steps=steps))
    calm = calm_driver.finish(timeout_s=600)
    counted = compare(driver.run, driver.out, steps=steps)
    return {
        "mode": mode,
        "servers killed": killer.kills_of("server"),
        "workers killed": killer.kills_of("worker"),
        "of them again": sum(n for (_, way), n in killer.kills.items() if way == "again"),
        "in snapshots": sum(n for (_, way), n in killer.kills.items() if way == "snapshot"),
        "restarts": hit["restarts"],
        "steps": steps,
        "seconds": round(seconds, 1),
        "occurrences": counted.occurrences,
        "lost": counted.lost,
        "doubled": counted.doubled,
        "calm lost / doubled": "{0.lost} / {0.doubled}".format(compare(driver.run, calm_driver.out, steps=steps)),
        "losses equal": curve(driver.out) == curve(calm_driver.out),
        "tables equal": same_bits(driver.out, calm_driver.out),
        "eval loss, hit / calm": f"{hit['run']['eval_loss']:.5f} / {calm['run']['eval_loss']:.5f}",
        "AUC, hit / calm": f"{hit['run']['auc']:.5f} / {calm['run']['auc']:.5f}",
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| |" + "".join(f" {row['mode']} |" for row in rows), "| --- |" + " --- |" * len(rows)]
    lines += [f"| {name} | " + " | ".join(str(row[name]) for row in rows) + " |" for name in rows[0] if name != "mode"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in each mode")
    parser.add_argument("--modes", nargs="+", default=["sync", "async", "geo"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        rows = []
        for mode in given.modes:
            rows.append(run_mode(mode, folder, kills=given.kills, dice=random.Random(given.seed)))
            print(json.dumps(rows[-1]), flush=True)
        print(as_table(rows))


if __name__ == "__main__":
    main()
