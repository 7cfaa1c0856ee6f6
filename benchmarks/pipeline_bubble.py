"""The bubble of every synchronous schedule, measured on two ranks beside what the simulation says of the same costs.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_bubble.py [--repeats 5] [--schedules 1f1b ...] [--no-pin] [--out FILE]

An engine for each schedule lives in the same two Gloo ranks, each pinned to its core; schedules take turns. A repeat is
a few steps of one, watched as `weft train` watches its own (`train/pipeline/watch.py`), and gives the figures of
pipeline.json: measured; replayed, every action as long as it was; simulated, every action as long as the mean of its
stage and kind. Figures are medians of the repeats. What lies between measured and simulated is told apart:

    uneven actions     replayed - simulated: the same action did not always take as long
    receive, send      a message that exists is waited for; an action's result is handed over. By gaps of the timeline;
                       both together, for each message, in ms: it hardly depends on how long actions are
    core               time that a rank was ready to run and did not: another process had its core

Four ranks need four cores: with fewer, their bubble is simulated with the costs measured here, and said to be.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist
from gloo import run_ranks
from pipeline_model import MICROBATCHES, build_engine, make_batch, pin, sizes, table, versions, waited_for_core_s

from weft.core.quiet import quiet_libraries
from weft.engine.engine import Engine
from weft.engine.pp.p2p import sent_by
from weft.schedule import Schedule, StageCosts, generate, simulate
from weft.train.pipeline.watch import PipelineWatch

BOUND_POINTS = 5.0
STEPS = 4  # a repeat: the first is let go, the median of the others counts
LIMIT_S = 900
VIRTUAL_STAGES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1, "zbv": 2,
    "dualpipev": 2,
}  # fmt: skip
MEDIANS = ("measured", "replayed", "simulated", "receive", "send", "message_s")
Facts = dict[str, Any]


def measure(rank: int, degree: int, names: list[str], repeats: int, pinned: bool, small: bool) -> list[Facts]:
    """On each rank, every repeat of every schedule, with the figures that pipeline.json would have."""
    quiet_libraries()
    engines = {
        name: build_engine(degree=degree, schedule=name, virtual_stages=VIRTUAL_STAGES[name], small=small)
        for name in names
    }
    batch = make_batch(small=small)
    if pinned:
        pin(rank)
    for engine in engines.values():  # shapes are told, memory is taken, the optimizer makes its states
        engine.step(batch)
    return [repeat_of(name, engine, batch) for _ in range(repeats) for name, engine in engines.items()]


def repeat_of(name: str, engine: Engine, batch: Facts) -> Facts:
    watch = PipelineWatch(engine)
    dist.barrier()
    queued_s, began_s = waited_for_core_s(), time.perf_counter()
    for _ in range(STEPS):
        engine.step(batch)
    stolen = (waited_for_core_s() - queued_s) / (time.perf_counter() - began_s)
    record = watch.gather(num_measured=0)
    if record is None:
        raise RuntimeError("nothing was watched")
    figures = record.figures()
    seconds = len(record.ranks) * figures["makespan_s"]["measured"]
    shares = {kind: sum(gaps[kind] for gaps in figures["gaps_s"]) / seconds for kind in ("receive", "send")}
    return {
        "schedule": name,
        **figures["bubble_share"],
        **shares,
        "message_s": sum(shares.values()) * seconds / num_messages(record.schedule),
        "core": stolen,
        "costs": {key: list(values) for key, values in vars(record.costs).items()},
    }


def num_messages(schedule: Schedule) -> int:
    return sum(1 for actions in schedule.ranks for _ in sent_by(actions, schedule.stage_to_rank))


def medians_of(name: str, found: list[list[Facts]]) -> Facts:
    """One row a schedule; every difference is taken inside a repeat, then its median."""
    first = [row for row in found[0] if row["schedule"] == name]
    second = [row for row in found[-1] if row["schedule"] == name]
    between = [row["measured"] - row["simulated"] for row in first]
    return {
        "schedule": name,
        **{key: median(row[key] for row in first) for key in MEDIANS},
        "between": median(between),
        "worst": max(map(abs, between)),
        "uneven": median(row["replayed"] - row["simulated"] for row in first),
        "core": median((a["core"] + b["core"]) / 2 for a, b in zip(first, second, strict=True)),
        "costs": {
            key: [median(values) for values in zip(*(row["costs"][key] for row in first), strict=True)]
            for key in first[0]["costs"]
        },
    }


def measured_table(rows: list[Facts], *, degree: int) -> list[str]:
    head = [
        "schedule", "measured", "simulated", "points between", "bound", "worst repeat", "uneven actions", "receive",
        "send", "a message, ms", "core", "equal stages",
    ]  # fmt: skip
    told = [
        [
            row["schedule"],
            f"{row['measured']:.1%}",
            f"{row['simulated']:.1%}",
            f"{row['between'] * 100:+.1f}",
            f"{BOUND_POINTS:.0f}{'' if abs(row['between']) * 100 <= BOUND_POINTS else ': missed'}",
            f"{row['worst'] * 100:.1f}",
            *(f"{row[key] * 100:+.1f}" for key in ("uneven", "receive", "send")),
            f"{row['message_s'] * 1e3:.2f}",
            f"{row['core'] * 100:.1f}",
            f"{equal_stages(row['schedule'], degree):.1%}",
        ]
        for row in rows
    ]
    return table(head, told)


def equal_stages(name: str, degree: int) -> float:
    """The schedule's own bubble: F = I = W, nothing to send."""
    return simulate(schedule_of(name, degree)).bubble_share


def schedule_of(name: str, degree: int) -> Schedule:
    return generate(name, num_ranks=degree, num_microbatches=MICROBATCHES, virtual_stages=VIRTUAL_STAGES[name])


def four_rank_rows(rows: list[Facts]) -> list[list[str]]:
    """Simulated on four ranks, from costs that two had: of four stages as they are, of eight at half of them."""
    whole = next((row["costs"] for row in rows if row["schedule"] == "interleaved_1f1b"), None)
    halves = next((row["costs"] for row in rows if row["schedule"] == "zbv"), None)
    told = []
    for row in rows:
        name = row["schedule"]
        costs = halves if name in ("zero_bubble", "zbv", "dualpipev") else whole
        if costs is None:
            continue
        schedule = schedule_of(name, 4)
        share = simulate(schedule, stretched(costs, schedule.num_stages)).bubble_share
        told.append([name, "not measured: 2 cores", f"{share:.1%}", f"{equal_stages(name, 4):.1%}"])
    return told


def stretched(costs: Facts, num_stages: int) -> StageCosts:
    """Costs of four stages as those of `num_stages` with the same blocks in all; a message stays a message."""
    times = num_stages // len(costs["forward_s"])
    parts = {
        key: tuple(value / times for value in costs[key] for _ in range(times))
        for key in ("forward_s", "backward_input_s", "backward_weight_s", "update_s")
    }
    return StageCosts(**parts, send_s=(fmean(costs["send_s"]),) * (num_stages - 1))


def result_page(rows: list[Facts], given: argparse.Namespace) -> str:
    lines = [
        f"# The bubble, measured and simulated, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats first: two Gloo ranks on two cores of one machine, each pinned to its own unless said otherwise;",
        f"messages are copies in memory. Medians of {given.repeats} repeats of {STEPS - 1} steps, schedules in turns.",
        "`measured` and `simulated` are pipeline.json's; `points between` is the median of the repeats' differences.",
        "Columns after it are points of the ranks' time and say where it comes from; `core` is time in which another",
        "process had a rank's core: near 0 on a quiet machine, and figures beside a large one are worth little.",
        "`simulated` has the measured mean cost of each stage; above `equal stages` it is unequal ones and messages.",
        "",
        f"- {versions()}",
        f"- {sizes(small=given.small)}{'; not pinned' if given.no_pin else ''}",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/pipeline_bubble.py --out FILE`",
        "",
        "## Two ranks",
        "",
        *measured_table(rows, degree=2),
    ]
    others = four_rank_rows(rows)
    if others:
        lines += [
            "",
            "## Four ranks: the simulated clock",
            "",
            "Four ranks would share two cores, so nothing is measured. Simulated with the costs that two ranks had:",
            "whole backwards by interleaved 1F1B, halves by ZBV, both of four stages; of eight stages, half of each.",
            "",
            *table(["schedule", "measured", "simulated", "equal stages"], others),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", choices=tuple(VIRTUAL_STAGES), default=list(VIRTUAL_STAGES))
    parser.add_argument("--no-pin", action="store_true")
    parser.add_argument("--small", action="store_true", help="sizes for a look")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if (os.cpu_count() or 1) < 2:
        raise SystemExit("two ranks need two cores")
    settings = (given.schedules, given.repeats, not given.no_pin, given.small)
    found = run_ranks(measure, 2, *settings, timeout_s=LIMIT_S)
    page = result_page([medians_of(name, found) for name in given.schedules], given)
    print(page)
    if given.out:
        given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
