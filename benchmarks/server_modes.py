"""Sync, async and geo on the embedded default: do they learn alike? And does the discount help where gradients are old?

    python benchmarks/server_modes.py [--part modes discount] [--seeds 0 1 2] [--set KEY=VALUE ...] [--out FILE]

modes      `weft server train --workers 4 --servers 2` as it comes, in sync, in async with a bound of 4, in geo with
           K = 10: held-out AUC and loss, and how far from sync of the same seed. The bar is 0.005 of AUC.
discount   the same run on real servers in this process, async without a bound, each push held back until 32 others
           were applied after its pull; with the discount and without, at the default learning rates and a quarter.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.cli.server import resolve
from weft.core.server_spec import FREE, ServerRun
from weft.core.table_spec import RowOptimizer
from weft.server.client import Client
from weft.server.model.dense import dense_spec
from weft.server.model.embedding import table_specs
from weft.server.model.task import Evaluator, open_task
from weft.server.node.server import Server
from weft.server.node.state import NodeSpec
from weft.server.worker.rows import Gradients, ServerRows
from weft.server.worker.worker import Worker, build_seeded, order_of

BAR = 0.005
WORKERS, SERVERS = 4, 2
MODES = {"sync": [], "async": ["--staleness", "4"], "geo": ["--set", "server.geo_steps=10"]}
STALENESS = 32
_TOKEN = "modes"


def train(mode: str, seed: int, folder: Path, changes: Iterable[str]) -> dict[str, Any]:
    """One run as a user makes it."""
    out = folder / f"{mode}-{seed}"
    command = [sys.executable, "-m", "weft.cli.main", "server", "train", "--workers", str(WORKERS)]
    command += ["--servers", str(SERVERS), "--mode", mode, *MODES[mode], "--out", str(out)]
    for change in (f"train.seed={seed}", *changes):
        command += ["--set", change]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures = json.loads((out / "ledger.json").read_text(encoding="utf-8"))["run"]
    return {
        "mode": mode,
        "seed": seed,
        "auc": figures["auc"],
        "loss": figures["eval_loss"],
        "seconds": time.monotonic() - start,
        "processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


class DelayedRows(ServerRows):
    """Pushes wait until `staleness` others were applied after their pull."""

    def __init__(self, client: Client, *, parts: int, staleness: int) -> None:
        super().__init__(client, parts=parts)
        self._waiting: deque[tuple[int, tuple[int, ...] | None, Gradients, float]] = deque()
        self._staleness = staleness

    def finish(self, gradients: Gradients, *, weight: float) -> tuple[int, ...]:
        kept = {name: (np.array(keys), np.array(values)) for name, (keys, values) in gradients.items()}
        self._waiting.append((self._unit, self._versions, kept, weight))
        return self._send() if len(self._waiting) > self._staleness else ()

    def send_all(self) -> None:
        while self._waiting:
            self._send()

    def _send(self) -> tuple[int, ...]:
        self._unit, self._versions, gradients, weight = self._waiting.popleft()
        return super().finish(gradients, weight=weight)


def train_delayed(run: ServerRun, folder: Path) -> dict[str, Any]:
    """The default run by one worker whose pushes are all `STALENESS` updates old; returns AUC, loss and that age."""
    spec = NodeSpec(num_servers=SERVERS, shares=WORKERS, gate=run.server.gate, discount=run.server.discount)
    servers = [Server(index=index, spec=spec, folder=None, token=_TOKEN) for index in range(SERVERS)]
    endpoints = [server.start() for server in servers]
    client = Client(endpoints.__getitem__, num_servers=SERVERS, token=_TOKEN, client_id=1)
    try:
        task = open_task(run, folder)
        model = build_seeded(task, seed=run.train.seed)
        for table in [*table_specs(model), dense_spec(run.dense.optimizer)]:
            client.create(table)
        evaluator = Evaluator(task, model, client)
        evaluator.assign_first()
        rows = DelayedRows(client, parts=WORKERS, staleness=STALENESS)
        worker = Worker(task, model, order_of(run, task), rows)
        ages = [age for unit in range(run.train.steps * WORKERS) for age in worker.do(unit, save=False).staleness]
        rows.send_all()
        figures = evaluator.evaluate()
        return {"auc": figures["auc"], "loss": figures["loss"], "staleness": max(ages, default=0)}
    finally:
        client.close()
        for server in servers:
            server.stop()


def delayed_run(seed: int, *, discount: float, rate: float, changes: Sequence[str]) -> ServerRun:
    run = resolve(None, [f"train.seed={seed}", *changes])

    def slower(optimizer: RowOptimizer) -> dict[str, Any]:
        return {**optimizer.model_dump(), "learning_rate": optimizer.learning_rate * rate}

    tables = run.model_dump()
    tables["sparse"]["optimizer"], tables["dense"]["optimizer"] = (
        slower(run.sparse.optimizer),
        slower(run.dense.optimizer),
    )
    tables["server"].update(
        mode="async", staleness=FREE, discount=discount, workers=WORKERS, servers=SERVERS, launcher="in_process"
    )
    return ServerRun.from_tables(tables)


def modes_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    sync = {row["seed"]: row for row in rows if row["mode"] == "sync"}
    lines = [
        "| seed | mode | held-out AUC | minus sync | loss | seconds | processor s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        minus = row["auc"] - sync[row["seed"]]["auc"]
        lines.append(
            f"| {row['seed']} | {row['mode']} | {row['auc']:.4f} | {minus:+.4f} | {row['loss']:.4f} |"
            f" {row['seconds']:.0f} | {row['processor_s']:.0f} |"
        )
    worst = max(abs(row["auc"] - sync[row["seed"]]["auc"]) for row in rows)
    verdict = "within" if worst <= BAR else "BEYOND"
    return [*lines, "", f"Largest difference from sync: {worst:.4f}, {verdict} the bar of {BAR}."]


def discount_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| seed | learning rates | discount | staleness | held-out AUC | loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['seed']} | x {row['rate']} | {row['discount']} | {row['staleness']} | {row['auc']:.4f} |"
            f" {row['loss']:.4f} |"
        )
    return lines


def measure_modes(seeds: Sequence[int], folder: Path, changes: Sequence[str]) -> list[str]:
    rows = []
    for seed in seeds:
        for mode in MODES:
            rows.append(train(mode, seed, folder, changes))
            print(json.dumps(rows[-1]), flush=True)
    return modes_table(rows)


def measure_discount(seeds: Sequence[int], folder: Path, changes: Sequence[str]) -> list[str]:
    rows = []
    default = ServerRun().server.discount
    for seed in seeds:
        for rate in (1.0, 0.25):
            for discount in (0.0, default):
                run = delayed_run(seed, discount=discount, rate=rate, changes=changes)
                found = train_delayed(run, folder)
                rows.append({"seed": seed, "rate": rate, "discount": discount, **found})
                print(json.dumps(rows[-1]), flush=True)
    return discount_table(rows)


PARTS = {"modes": measure_modes, "discount": measure_discount}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE", help="of the run")
    parser.add_argument("--out", type=Path, help="the tables go here, too")
    given = parser.parse_args()
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for part in given.part:
            lines += [f"## {part}", "", *PARTS[part](given.seeds, Path(scratch), given.changes), ""]
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
