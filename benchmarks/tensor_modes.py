"""Tensor parallelism in 1, 2, 2.5 and 3 dimensions side by side: memory and bytes of a rank, by dry run.

    python benchmarks/tensor_modes.py [--out benchmarks/results/tensor_modes-DATE.md] [--gloo]

Rank 0 of 4, 8, 16 and 64 ranks takes one step on fake tensors and the fake process group: the engine's own code, its
collectives counted as they go out. Two loads: many tokens (activations outweigh weights) and few. `--gloo` adds real
ranks, 4 and 8 processes of a small model, whose bytes must be the dry run's.

The papers' leading terms, bytes a rank sends for a block's linears, forward (A: inputs, B: weights, C: outputs;
2D: Xu et al. 2021, 2.5D: Wang et al. 2021, 3D: Bian et al. 2021):

    1D    2 (p - 1) / p x 2 t h              two all-reduces, whatever p
    2D    (q - 1) / q x (A + B) / q          q x q, panels passed along rows and columns
    2.5D  (q - 1) / q x (A / d + B) / q      d layers: each has its share of the tokens, and all of the weights
    3D    (q - 1) / q x (A + B + C) / q^2    a cube
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gloo import run_ranks

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import FakeTraining, dry_run
from weft.engine.measure.meter import StepMeter

GIB = 2**30
# a block of a 70B model, twice: the table is of blocks, not of depth
MODEL = {
    "type": "llama",
    "config": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 2, "num_attention_heads": 64,
        "num_key_value_heads": 64, "vocab_size": 32000,
    },
}  # fmt: skip
SMALL = {
    "type": "llama",
    "config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 257,
    },
}  # fmt: skip
LOADS = {"many tokens": (64, 1024), "few tokens": (16, 64)}
MODES = {
    4: ("1d", "1d sequence parallel", "2d"),
    8: ("1d", "1d sequence parallel", "2.5d", "3d"),
    16: ("1d", "1d sequence parallel", "2d"),
    64: ("1d", "1d sequence parallel", "2d", "2.5d", "3d"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gloo", action="store_true", help="also run 4 and 8 real ranks of a small model")
    given = parser.parse_args()
    began_s = time.perf_counter()
    sections = [
        "# Modes of tensor parallelism: memory and bytes of one rank",
        "",
        f"torch {torch.__version__}; {MODEL['config']}; bf16, AdamW; one step, one micro-batch; dry runs of rank 0.",
    ]
    for name, (rows, length) in LOADS.items():
        sections += ["", f"## {name.capitalize()}: {rows} x {length}", "", *table(rows, length)]
    if given.gloo:
        sections += ["", "## Real ranks (Gloo) against the dry run, small model", "", *against_gloo()]
    sections += ["", f"{time.perf_counter() - began_s:.0f} s"]
    report = "\n".join(sections) + "\n"
    print(report)
    if given.out is not None:
        given.out.write_text(report)


def table(rows: int, length: int) -> list[str]:
    head = ["ranks", "mode", "weights", "states", "activations", "loss", "peak", "sent forward", "backward", "update"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for ranks, modes in MODES.items():
        for mode in modes:
            found = dry_run(run_of(MODEL, rows=rows, length=length), plan_of(mode, ranks), rank=0)
            sent = bytes_by_phase(found.traffic)
            terms = found.terms
            cells = [
                str(ranks),
                mode,
                gib(terms.get("weights", 0)),
                gib(terms.get("optimizer_state", 0)),
                gib(terms.get("activations", 0)),
                gib(terms.get("logits_and_loss", 0)),
                gib(found.peak_bytes),
                *(gib(sent.get(phase, 0)) for phase in ("forward", "backward", "update")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def against_gloo() -> list[str]:
    lines = ["| ranks | mode | collective | phase | dry run | real rank 0 |", "| --- | --- | --- | --- | --- | --- |"]
    for ranks in (4, 8):
        for mode in MODES[ranks]:
            foreseen = dry_run(run_of(SMALL, rows=8, length=32), plan_of(mode, ranks, precision="fp32"), rank=0)
            real = run_ranks(measured, ranks, mode, timeout_s=180)[0]
            for row, other in zip(foreseen.traffic, real, strict=True):
                if row != other:
                    raise SystemExit(f"{mode} on {ranks}: {row} foreseen, {other} sent")
                cells = [str(ranks), mode, row["collective"], row["phase"], f"{row['bytes']:,}", f"{other['bytes']:,}"]
                lines.append("| " + " | ".join(cells) + " |")
    return lines


def measured(rank: int, world: int, mode: str) -> list[dict[str, Any]]:
    stage = FakeTraining(run_of(SMALL, rows=8, length=32), plan_of(mode, world, precision="fp32"))
    stage.build()
    meter = StepMeter(stage.engine)
    for _ in range(2):
        with meter.measuring():
            meter.next_step()
            stage.step()
    return meter.traffic


def run_of(model: Mapping[str, Any], *, rows: int, length: int) -> RunSpec:
    return RunSpec.from_tables(
        {"model": dict(model), "data": {"sequence_length": length}, "train": {"global_batch": rows}}
    )


def plan_of(mode: str, ranks: int, *, precision: str = "bf16") -> Plan:
    name, _, stream = mode.partition(" ")
    return Plan.from_tables(
        {
            "mesh": {"tp": ranks},
            "tensor_parallel": {"mode": name, "sequence_parallel": bool(stream)},
            "precision": {"preset": precision},
        }
    )


def bytes_by_phase(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        if row["axis"] == "tp":
            found[row["phase"]] = found.get(row["phase"], 0) + int(row["bytes"])
    return found


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.3f}"


if __name__ == "__main__":
    main()
