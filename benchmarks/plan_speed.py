"""How fast does the planner think? Plans a second of one core, two searches, and `weft plan` from command to answer.

    OPENBLAS_NUM_THREADS=1 python benchmarks/plan_speed.py [--repeat 5] [--out FILE] [--profile]

CPU time of this process on one thread; the command's wall time, interpreter and imports included. A plan counts as
estimated when its memory, traffic and time are all known. The search is vectorised and prunes nothing but time: a plan
that does not fit gets no step time. `--profile` prints the hottest functions of the large search and stops.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy: its threads would count as this process's time

import argparse
import cProfile
import datetime
import json
import platform
import pstats
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from weft import hardware, zoo
from weft.core.precision import policy_of
from weft.plan.estimate import estimate_columns
from weft.plan.request import Request, Workload
from weft.plan.rules import legal_rows
from weft.plan.search import CHUNK, search
from weft.plan.space import Freedom, enumerate_plans

CASES = {
    "llama-3-8b on 8xH100-80GB": ("llama-3-8b", "8xH100-80GB", 64, 8192),
    "llama-3.1-405b on 16384xH100-80GB": ("llama-3.1-405b", "16384xH100-80GB", 2048, 8192),
    "deepseek-v3 on 2048xH800": ("deepseek-v3", "2048xH800", 15_360, 4096),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    if chosen.profile:
        profile(request_of("llama-3.1-405b on 16384xH100-80GB"))
        return
    text = render(repeat=chosen.repeat)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")


def request_of(case: str) -> Request:
    model, devices, batch, length = CASES[case]
    return Request(
        shape=zoo.named(model),
        cluster=hardware.cluster(devices),
        workload=Workload(global_batch=batch, sequence_length=length),
        precision=policy_of("bf16"),
    )


def render(*, repeat: int) -> str:
    lines = [
        f"# How fast the planner is, {datetime.date.today().isoformat()}",
        "",
        "Caveats first: one core of a shared x86-64 machine, whose other load moves the figures by about a tenth.",
        "CPU time of the process for the searches, wall time for the command. Schedule figures are cached, and a first",
        "pass that fills the caches is not counted; `weft plan` starts with empty ones.",
        "",
        f"- Versions: Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}; "
        f"{os.cpu_count()} cores with a load of {os.getloadavg()[0]:.1f} when this began.",
        f"- Command: `OPENBLAS_NUM_THREADS=1 python benchmarks/plan_speed.py --repeat {repeat}`; medians of {repeat}.",
        "",
        "| question | candidates | legal | fit | estimate all, plans a second | search, CPU s | candidates a second |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(case_row(case, repeat=repeat) for case in CASES),
        "",
        "Estimating all means memory, traffic and time of every legal plan. The search builds the candidates, refuses",
        "the illegal ones, and estimates memory of the rest and time of those that fit.",
        "",
        "| command | wall s | CPU s | of it in the search, wall s |",
        "| --- | --- | --- | --- |",
        *(command_row(case, repeat=repeat) for case in CASES),
    ]
    return "\n".join(lines) + "\n"


def case_row(case: str, *, repeat: int) -> str:
    request = request_of(case)
    answer = search(request, precision={"preset": "bf16"})
    search_s = median_cpu_s(lambda: search(request, precision={"preset": "bf16"}), repeat=repeat)
    estimate_s = median_cpu_s(lambda: estimate_all(request), repeat=repeat) - median_cpu_s(
        lambda: legal(request), repeat=repeat
    )
    cells = (
        case,
        f"{answer.considered:,}",
        f"{answer.estimated:,}",
        f"{answer.num_fitting:,}",
        f"{answer.estimated / estimate_s:,.0f}",
        f"{search_s:.2f}",
        f"{answer.considered / search_s:,.0f}",
    )
    return "| " + " | ".join(cells) + " |"


def legal(request: Request) -> np.ndarray:
    candidates = enumerate_plans(request, Freedom())
    return np.flatnonzero(legal_rows(request, candidates)[0])


def estimate_all(request: Request) -> None:
    """Everything of every legal plan, in the search's own portions."""
    candidates = enumerate_plans(request, Freedom())
    rows = np.flatnonzero(legal_rows(request, candidates)[0])
    for begin in range(0, len(rows), CHUNK):
        costs = estimate_columns(request, candidates.take(rows[begin : begin + CHUNK]))
        assert len(costs.step_s) == len(costs.fits)


def median_cpu_s(work: Callable[[], object], *, repeat: int) -> float:
    spent = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return statistics.median(spent)


def command_row(case: str, *, repeat: int) -> str:
    model, devices, batch, length = CASES[case]
    command = ["plan", model, "--devices", devices, "--global-batch", str(batch), "--sequence-length", str(length)]
    walls, cpus, inside = [], [], []
    for _ in range(repeat):
        began, cpu_before = time.perf_counter(), children_cpu_s()
        run = subprocess.run(
            [sys.executable, "-m", "weft.cli.main", *command, "--json"], capture_output=True, text=True, check=True
        )
        walls.append(time.perf_counter() - began)
        cpus.append(children_cpu_s() - cpu_before)
        inside.append(json.loads(run.stdout)["elapsed_s"])
    medians = " | ".join(f"{statistics.median(values):.2f}" for values in (walls, cpus, inside))
    return f"| `weft {' '.join(command)}` | {medians} |"


def children_cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def profile(request: Request) -> None:
    search(request, precision={"preset": "bf16"})
    watcher = cProfile.Profile()
    watcher.runcall(search, request, precision={"preset": "bf16"})
    pstats.Stats(watcher).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
