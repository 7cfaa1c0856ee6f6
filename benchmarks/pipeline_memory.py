"""What 1F1B saves of F-then-B (GPipe): micro-batches held and bytes of activations, simulated, dry and on real ranks.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_memory.py [--cases 4x4 5x8] [--no-ranks] [--out FILE]

The published figure is 37.5% (PaddlePaddle's guide to its pipelines, at four stages). It follows from the order alone,
with p stages and m micro-batches, where a stage holds a micro-batch from its forward until its backward:

    F-then-B    m on every stage            1F1B    min(p - s, m) on stage s
    p = m = 4   10 of 16 over all stages: 37.5% less
    p = 5, m = 8   5 of 8 on the first stage: 37.5% less

Counted are the micro-batches that the walk held on real Gloo ranks, and the activations at each rank's peak by the
meter that fills the ledger: in a dry run of every rank, and on real ones. The peak of a rank is one moment, inside a
block's backward or at the loss: of the oldest micro-batch a part is gone by then.
"""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path
from typing import Any

from gloo import run_ranks
from metered_ranks import metered_in_rank
from pipeline_model import table, versions

from weft.core.plan import Plan
from weft.core.quiet import quiet_libraries
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm
from weft.dryrun.run import dry_run
from weft.schedule import count_in_flight, generate

SCHEDULES = ("gpipe", "1f1b")
PUBLISHED = 0.375
BLOCKS_A_STAGE, LENGTH = 2, 256
SHAPE = {
    "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320,
}  # fmt: skip
LIMIT_S = 300
Facts = dict[str, Any]


def run_of(num_stages: int, num_microbatches: int) -> Facts:
    config = {**SHAPE, "num_hidden_layers": BLOCKS_A_STAGE * num_stages}
    return {
        "model": {"type": "llama", "config": config},
        "data": {"sequence_length": LENGTH},
        "train": {"global_batch": num_microbatches},
    }


def plan_of(schedule: str, num_stages: int, num_microbatches: int) -> Facts:
    return {"mesh": {"pp": num_stages}, "pipeline": {"schedule": schedule, "microbatches": num_microbatches}}


def measure_in_rank(rank: int, num_stages: int, num_microbatches: int) -> list[Facts]:
    """On this rank, for each schedule: the micro-batches held and the activations at the peak."""
    quiet_libraries()
    found = []
    for schedule in SCHEDULES:
        plan = plan_of(schedule, num_stages, num_microbatches)
        one = metered_in_rank(rank, num_stages, run_of(num_stages, num_microbatches), plan)
        found.append({"held": one["held_by_stage"][rank], "bytes": one["terms"][str(MemoryTerm.ACTIVATIONS)]})
    return found


def dry_bytes(schedule: str, num_stages: int, num_microbatches: int) -> list[int]:
    """Activations at the peak of every rank."""
    run = RunSpec.from_tables(run_of(num_stages, num_microbatches))
    plan = Plan.from_tables(plan_of(schedule, num_stages, num_microbatches))
    found = [dry_run(run, plan, rank=rank, on_gpu=False) for rank in range(num_stages)]
    return [one.terms[str(MemoryTerm.ACTIVATIONS)] for one in found]


def compare(num_stages: int, num_microbatches: int, *, with_ranks: bool) -> Facts:
    """By what is counted, then by schedule: a number for each stage."""
    real: list[list[Facts]] = []
    if with_ranks:
        real = run_ranks(measure_in_rank, num_stages, num_microbatches, timeout_s=LIMIT_S)
    found: dict[str, dict[str, list[int]]] = {"scheduled": {}, "held": {}, "dry": {}, "bytes": {}}
    for index, name in enumerate(SCHEDULES):
        schedule = generate(name, num_ranks=num_stages, num_microbatches=num_microbatches, virtual_stages=1)
        found["scheduled"][name] = list(count_in_flight(schedule).by_stage_until_weight)
        found["dry"][name] = dry_bytes(name, num_stages, num_microbatches)
        for what in ("held", "bytes") if with_ranks else ():
            found[what][name] = [one[index][what] for one in real]
    return {"stages": num_stages, "microbatches": num_microbatches, "found": found}


WORDS = {
    "scheduled": "micro-batches held, by the schedule",
    "held": "micro-batches held, counted on real ranks",
    "dry": "activations at the peak, dry run",
    "bytes": "activations at the peak, real ranks",
}


def saved(ours: float, theirs: float) -> str:
    return f"{1 - ours / theirs:.1%}"


def case_lines(case: Facts) -> list[str]:
    """Stage by stage, the sum of all, the share saved."""
    head = ["counted", "schedule", *(f"stage {stage}" for stage in range(case["stages"])), "all stages"]
    head += ["saved on stage 0", "saved on all"]
    rows = []
    for what, by_schedule in case["found"].items():
        for name, values in by_schedule.items():
            base = by_schedule[SCHEDULES[0]]
            shares = [saved(values[0], base[0]), saved(sum(values), sum(base))] if name != SCHEDULES[0] else ["", ""]
            numbers = [_number(what, value) for value in (*values, sum(values))]
            rows.append([WORDS[what], name, *numbers, *shares])
    title = f"## {case['stages']} stages, {case['microbatches']} micro-batches"
    return [title, "", *table(head, rows), ""]


def _number(what: str, value: int) -> str:
    return str(value) if what in ("scheduled", "held") else f"{value / 2**20:.2f} MiB"


def result_page(cases: list[Facts], *, elapsed_s: float) -> str:
    lines = [
        f"# Activations of 1F1B against F-then-B, {datetime.date.today():%Y-%m-%d}",
        "",
        f"Caveats first: a Llama of {BLOCKS_A_STAGE} blocks a stage, width {SHAPE['hidden_size']}, float32, CPU ranks,",
        f"micro-batches of 1 x {LENGTH} tokens. Bytes are the activations at the moment of a rank's own peak, which",
        "need not be the same moment on every rank or under both schedules: part of the oldest micro-batch may be gone",
        f"by then. Published: {PUBLISHED:.1%} less, which is 1 - (4 + 3 + 2 + 1) / (4 x 4) over all of four stages,",
        "and 1 - 5/8 on the first of five. Gloo does not say when a message has left, so real ranks keep all they",
        "sent until the step ends; a dry run takes it to have left at once.",
        "",
        f"- {versions()}; {elapsed_s:.0f} s",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/pipeline_memory.py --out FILE`",
        "",
    ]
    lines += [line for case in cases for line in case_lines(case)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["4x4", "5x8"], help="STAGESxMICROBATCHES")
    parser.add_argument("--no-ranks", action="store_true", help="the schedule and the dry run alone")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    quiet_libraries()
    began_s = time.perf_counter()
    sizes = [tuple(map(int, case.split("x"))) for case in given.cases]
    cases = [compare(stages, cuts, with_ranks=not given.no_ranks) for stages, cuts in sizes]
    page = result_page(cases, elapsed_s=time.perf_counter() - began_s)
    print(page)
    if given.out:
        given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
