"""The default run under 1F1B, PipeDream-2BW and PipeDream: where do delayed updates end, beside prompt ones?

    OMP_NUM_THREADS=1 python benchmarks/pipedream_loss.py --out FILE [--rates 1e-3 3e-4] [--steps 200] [--ranks 2]

Each is `weft train` as a user runs it: the embedded default (real text, nothing to download), two stages on CPU
processes. The loss is the mean of the last steps', which see the same rows in every run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
from pathlib import Path

import torch
from trained import metrics_of

BOUND = 1.03
LAST = 20
KINDS = {
    "1f1b": {"pipeline.schedule": "1f1b"},
    "pipedream_2bw": {"pipeline.schedule": "pipedream_2bw"},
    "pipedream": {"pipeline.schedule": "pipedream"},
    "pipedream, vertical sync": {"pipeline.schedule": "pipedream", "pipeline.vertical_sync": "true"},
}


def train(kind: str, *, rate: float, steps: int, microbatches: int, ranks: int) -> tuple[float, float]:
    """(mean loss of the last steps, loss of the last evaluation)."""
    settings = {
        "mesh.pp": ranks, "pipeline.microbatches": microbatches, "train.steps": steps, "evaluation.every": steps,
        "train.learning_rate": rate,
        "checkpoint.every": 0, "ledger.dry_run": "false", **KINDS[kind],
    }  # fmt: skip
    records = metrics_of(kind, settings, "--nproc", str(ranks))
    return statistics.fmean(record["loss"] for record in records[-LAST:]), records[-1]["eval_loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-4])  # the default run's, and a calmer one
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = {}
    for rate in given.rates:
        for kind in KINDS:
            found[rate, kind] = train(
                kind, rate=rate, steps=given.steps, microbatches=given.microbatches, ranks=given.ranks
            )
            print(rate, kind, *found[rate, kind], file=sys.stderr, flush=True)
    lines = [
        f"# Delayed updates beside prompt ones on the default run, {datetime.date.today()}",
        "",
        "Caveats first: one small model (5 million parameters), one corpus, one seed. PipeDream makes an update a",
        f"micro-batch, {given.microbatches} a step, at the same learning rate: where it ends lower, that is why.",
        "",
        f"- {given.ranks} stages, {given.microbatches} micro-batches a step, {given.steps} steps; the last {LAST}",
        f"- torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/pipedream_loss.py --out FILE`",
        "",
        "| learning rate | schedule | loss | over 1F1B's | held-out loss | over 1F1B's | bound |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (rate, kind), (loss, held_out) in found.items():
        prompt = found[rate, "1f1b"]
        ratios = (loss / prompt[0], held_out / prompt[1])
        verdict = f"{BOUND}" + ("" if max(ratios) <= BOUND else ": missed")
        lines.append(
            f"| {rate:g} | {kind} | {loss:.4f} | {ratios[0]:.4f} | {held_out:.4f} | {ratios[1]:.4f} | {verdict} |"
        )
    page = "\n".join([*lines, ""])
    print(page)
    if given.out is not None:
        given.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
