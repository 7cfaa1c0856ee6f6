"""Time until `weft ui` has drawn its first page, and the server's memory, over many long runs, in a real browser.

    python benchmarks/ui.py [--runs 50] [--steps 100000] [--folder FOLDER] [--times 5]

Cold: without an index of the metrics, so that curves are first drawn from samples. Warm: a new server and a new browser
on the same folder, after the index was made. Each so many times. Time counts from the request of the page to the first
drawing of all loss curves on the screen, and to the chart that answers to the mouse.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from chromium import Chromium

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--times", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch) / "runs"
        for number in range(chosen.runs):
            write_run(folder / f"run-{number:02d}", steps=chosen.steps, seed=number)
        total = sum(path.stat().st_size for path in folder.glob("*/metrics.jsonl"))
        print(f"{chosen.runs} runs of {chosen.steps:,} steps, {total / 2**20:,.0f} MiB of metrics")
        cold = [measure(folder, Path(scratch) / f"cold-{number}") for number in range(chosen.times)]
        show("cold", cold)
        cache = Path(scratch) / "cache"
        show("index", [measure(folder, cache, wait_for_index=True)])
        show("warm", [measure(folder, cache) for _ in range(chosen.times)])


def show(name: str, found: list[dict[str, float]]) -> None:
    """The median and all values, with the processes that were ready to run."""
    rows = {key: [round(one[key], 2) for one in found] for key in found[0]}
    print(json.dumps({name: {key: {"median": statistics.median(row), "all": row} for key, row in rows.items()}}))
    sys.stdout.flush()


def write_run(path: Path, *, steps: int, seed: int) -> None:
    """A run folder as `weft train` leaves it, of made-up steps."""
    if (path / "metrics.jsonl").exists():
        return
    path.mkdir(parents=True)
    noise = np.random.default_rng(seed)
    losses = 2 + 5 * np.exp(-np.arange(steps) / (steps / 5)) + noise.normal(0, 0.1, steps)
    with (path / "metrics.jsonl").open("w") as file:
        for step, (loss, norm) in enumerate(zip(losses, noise.gamma(2, 0.3, steps), strict=True), 1):
            step_s = 0.36 + norm / 100
            record: dict[str, Any] = {
                **{"step": step, "loss": loss, "grad_norm": norm, "tokens": 8192, "learning_rate": 3e-4 / step**0.5},
                **{"step_s": step_s, "tokens_per_s": 8192 / step_s, "peak_memory_bytes": 318_000_000},
            }
            if step % 1000 == 0:
                record["eval_loss"] = loss + 0.1
            file.write(json.dumps(record) + "\n")
    run = RunSpec.default().to_toml().replace("steps = 200", f"steps = {steps}")
    (path / "run.toml").write_text(run)
    (path / "plan.toml").write_text(Plan.from_tables({"mesh": {"dp_shard": 2}}).to_toml())


def measure(folder: Path, cache: Path, *, wait_for_index: bool = False) -> dict[str, float]:
    with serving(folder, cache) as (url, process), Chromium(width=1400, height=1000) as browser:
        browser_before_s = sum(map(processor_seconds, browser.processes()))
        imports_s = processor_seconds(process.pid)
        began_s = time.perf_counter()
        browser.open(url)
        browser.wait_for("document.body && document.body.dataset.drawn === '1'")
        outside_s = time.perf_counter() - began_s
        browser_s = sum(map(processor_seconds, browser.processes())) - browser_before_s
        server_s = processor_seconds(process.pid)
        drawn_ms = browser.run("performance.getEntriesByName('drawn')[0].startTime")
        browser.wait_for("document.body.dataset.ready === '1'")
        ready_ms = browser.run("performance.getEntriesByName('ready')[0].startTime")
        load, index_s = os.getloadavg()[0], 0.0
        if wait_for_index:
            script = "fetch('/api/runs').then(r => r.json()).then(f => f.read_bytes >= f.size_bytes)"
            while not browser.run(script):
                time.sleep(0.2)
            index_s = time.perf_counter() - began_s
            browser.wait_for("!document.getElementById('state').textContent.includes('reading')")
            browser.run("new Promise(done => setTimeout(done, 7000))")  # two refreshes with all charts
        assert not browser.errors, browser.errors
        return {
            "first_drawing_s": drawn_ms / 1e3, "answers_to_the_mouse_s": ready_ms / 1e3,
            "with_navigation_s": outside_s, "index_s": index_s, "load": load,
            "processor_s_of_browser": browser_s,
            "processor_s_of_server": server_s - imports_s,
            "server_peak_rss_mib": peak_rss(process.pid), "server_rss_mib": peak_rss(process.pid, key="VmRSS"),
        }  # fmt: skip


@contextmanager
def serving(folder: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "weft", "ui", str(folder), "--no-browser"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1], process
    finally:
        process.terminate()
        process.wait()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss(pid: int, *, key: str = "VmHWM") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    assert shutil.which("chromium"), "chromium is not installed"
    main()
