"""Does the planner predict published step times? Every confirmed run of the table against `weft.plan`.

    python benchmarks/published_runs.py --out benchmarks/results/published_runs-DATE.md

The runs, their sources and what was assumed are in tests/support/published_runs.toml; how a run becomes a plan is in
tests/unit/plan/published_plans.py. Nothing is trained: it is arithmetic on a CPU. Error = predicted / published - 1.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "plan"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))  # before this script of the same name

from published_plans import Comparison, by_framework, comparable_runs, compare, float8_runs, median_size
from published_runs import published_runs

CAVEATS = """Caveats first.

- What a document does not state is assumed, and marked `*` with the keys: {assumed} of {count} runs have such a key
  (layout, micro-batch, recomputation, ZeRO stage, sequence length, config, precision). The {known} others have a median
  error of {known_median}.
- No blind test: the constants of the cost model (attention's share, overlap, passes over memory) were chosen while
  this table was known. Rates of products come from other measurements, but for the H100-96GB, whose level was set by
  a torchtitan run: on that part the runs test differences between layouts only.
- A run is taken as compiled where it says so, and where the trainer has fused kernels of its own (Megatron, NeMo,
  Meta). Overlap of tensor-parallel communication, where a run has it, is not in the prediction.
- Runs in float8 are a table of their own. They are priced as float8 in every linear layer of the blocks, one scale a
  tensor, cast by compiled kernels of their own; Megatron casts inside other kernels and takes experts too.
- Left out: {unplanned} in float8 with a schedule that plans have not, {unconfirmed} known by hearsay, {timeless}
  without a step time.
- Far off, with what is known of the reason:
  - DeepSpeed ZeRO-3 (2021): the published step does not get shorter from 768 to 1,536 devices, so something other
    than arithmetic and bytes sets its pace; the prediction is of today's prefetched gathers.
  - Megatron-DeepSpeed: BLOOM's cluster had four 100 Gb/s links a node, a quarter of what the catalogue's fabric has,
    and its steps get shorter with larger micro-batches where the predicted ones get longer by the bubble. MT-NLG's
    layout is assumed.
  - Megatron-Bridge: mixtures of experts. Permutation, padding and the small products of many experts are not in the
    formulas.
  - fms-fsdp: 400 or 800 Gb/s a node (the catalogue's H100 node has 3,200), and whole blocks recomputed where a plan
    says selective.
  - torchtitan: all on the H100-96GB, a 500 W part whose true peak is not published; its rate is an H200's times 0.79.
  - GB200: predicted a fifth too fast, on a rate taken from the best product that was measured.
  - Meta's 405B: a third of the predicted step is ZeRO-2's reduction in every micro-batch, counted as exposed.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    text = render([compare(run) for run in comparable_runs()], [compare(run) for run in float8_runs()])
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")


def render(comparisons: list[Comparison], in_float8: list[Comparison]) -> str:
    lines = [
        f"# Predicted against published step times, {datetime.date.today().isoformat()}",
        "",
        caveats(comparisons),
        f"- Versions: Python {platform.python_version()}; no torch, no device.",
        "- Command: `python benchmarks/published_runs.py --out FILE`",
        f"- Median error over {len(comparisons)} runs: {median_size(comparisons):.1%}; "
        f"{within(comparisons, 0.15):.0%} of the runs within 15%, {within(comparisons, 0.30):.0%} within 30%.",
        "",
        *tables(comparisons),
        "",
        "## In float8",
        "",
        *tables(in_float8),
    ]
    return "\n".join(lines) + "\n"


def tables(comparisons: list[Comparison]) -> list[str]:
    return [
        "| framework | runs | median error | median size of the error |",
        "| --- | --- | --- | --- |",
        *(framework_row(name, group) for name, group in sorted(by_framework(comparisons).items())),
        f"| all | {len(comparisons)} | {signed_median(comparisons):+.1%} | {median_size(comparisons):.1%} |",
        "",
        "| run | framework | devices | layout | published s | predicted s | error | GiB: predicted / published |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(row(each) for each in comparisons),
    ]


def caveats(comparisons: list[Comparison]) -> str:
    runs = published_runs()
    reasons = Counter(
        "unconfirmed" if not run.confirmed else "timeless" if run.step_s is None else run.precision for run in runs
    )
    known = [each for each in comparisons if not assumed_keys(each)]
    return CAVEATS.format(
        assumed=len(comparisons) - len(known),
        count=len(comparisons),
        known=len(known),
        known_median=f"{median_size(known):.1%}",
        unplanned=reasons["fp8"] - len(float8_runs()),
        unconfirmed=reasons["unconfirmed"],
        timeless=reasons["timeless"],
    )


def assumed_keys(each: Comparison) -> list[str]:
    return [key for key in each.run.assumed if key not in ("date", "flops", "overlap")]


def within(comparisons: list[Comparison], bound: float) -> float:
    return sum(abs(each.error) < bound for each in comparisons) / len(comparisons)


def signed_median(comparisons: list[Comparison]) -> float:
    return statistics.median(each.error for each in comparisons)


def framework_row(name: str, group: list[Comparison]) -> str:
    return f"| {name} | {len(group)} | {signed_median(group):+.1%} | {median_size(group):.1%} |"


def row(each: Comparison) -> str:
    run = each.run
    star = f" * ({', '.join(assumed_keys(each))})" if assumed_keys(each) else ""
    memory = (
        f"{each.predicted.memory_bytes / 2**30:.1f} / {run.peak_memory_gib} {run.memory}" if run.peak_memory_gib else ""
    )
    cells = (
        f"{run.id}{star}",
        run.framework,
        run.devices,
        layout(each),
        f"{each.published_s:.3f}",
        f"{each.predicted.step_s:.3f}",
        f"{each.error:+.1%}",
        memory,
    )
    return "| " + " | ".join(cells) + " |"


def layout(each: Comparison) -> str:
    plan, run = each.predicted.plan, each.run
    degrees = [f"{axis}{size}" for axis, size in plan.mesh.sizes().items() if size > 1]
    experts = [f"ep{plan.mesh.ep}"] if plan.mesh.ep > 1 else []
    schedule = [f"{run.schedule} v{run.virtual_stages}"] if run.pp > 1 else []
    rest = [
        f"zero{run.zero}",
        *schedule,
        f"{run.microbatches} x {run.micro_batch} x {run.sequence_length}",
        run.recompute,
    ]
    return ", ".join(degrees + experts + rest)


if __name__ == "__main__":
    main()
