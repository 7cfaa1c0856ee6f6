"""Loss after the same steps by optimizer, and bytes of state per parameter, predicted and measured.

    python benchmarks/optimizers.py [--steps 300] [--out FILE]

A small Llama on Python's own source, one process. Rates are those of usual recipes, not tuned: each optimizer gets
one rate and the shared schedule. States are counted from the live optimizer after the first step.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import weft
from weft.checkpoint import peek_newest, read_manifest
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.ask import ask
from weft.plan.estimate import estimate

MODEL = {
    "type": "llama",
    "config": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": 2e-3},
    "muon": {"learning_rate": 2e-3},
    "lion": {"learning_rate": 3e-4, "betas": [0.9, 0.99]},
    "adafactor": {"learning_rate": 2e-2},
    "adamw, ema 0.99": {"optimizer": "adamw", "learning_rate": 2e-3, "ema_decay": 0.99},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(name, case, steps=options.steps) for name, case in CASES.items()]
    text = page(rows, steps=options.steps)
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


def measure(name: str, case: dict[str, Any], *, steps: int) -> dict[str, Any]:
    train = {"optimizer": name, "steps": steps, "global_batch": 8, "warmup_steps": 20, "clip_norm": 1.0} | case
    tables = {
        "model": MODEL,
        "data": {"sequence_length": 128},
        "train": train,
        "evaluation": {"every": steps, "batches": 8, "weights": "ema" if "ema_decay" in case else "trained"},
        "checkpoint": {"every": 0},
        "logging": {"tensorboard": False},
        "ledger": {"measure": False, "dry_run": False},
    }
    run = RunSpec.from_tables(tables)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        began_s = time.perf_counter()
        weft.train(run, Plan(), out=folder, quiet=True)
        elapsed_s = time.perf_counter() - began_s
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        checkpoint = peek_newest(folder / "checkpoints")
        tensors = read_manifest(checkpoint.path).tensors  # type: ignore[union-attr]
        (path := Path(scratch, "run.toml")).write_text(run.to_toml(), encoding="utf-8")
        predicted = estimate(ask(str(path), "1xcpu").request, Plan()).memory_terms["optimizer_state"]
    sizes = {key: torch.Size(value.shape).numel() for key, value in tensors.items()}
    parameters = sum(size for key, size in sizes.items() if key.startswith("model."))
    states = sum(size for key, size in sizes.items() if key.startswith("optim.") and not key.endswith(".step"))
    return {
        "name": name,
        "rate": train["learning_rate"],
        "loss": sum(record["loss"] for record in records[-10:]) / 10,
        "held_out": next(
            (record["eval_loss"] for record in reversed(records) if record.get("eval_loss")), float("nan")
        ),
        "step_ms": 1000 * sorted(record["step_s"] for record in records)[len(records) // 2],
        "predicted": predicted / parameters,
        "measured": 4 * states / parameters,
        "elapsed_s": elapsed_s,
    }


def page(rows: list[dict[str, Any]], *, steps: int) -> str:
    lines = [
        f"# Optimizers after {steps} steps",
        "",
        "Caveats: one small model, one seed, untuned rates of usual recipes, a machine that other work shared: losses",
        "show no more than that each optimizer trains, step times only roughly. One process on a CPU; Muon's steps",
        "in float32. Not run on a GPU.",
        "",
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}.",
        f"Command: `python benchmarks/optimizers.py --steps {steps}`. A Llama of hidden size 128, 4 layers, on",
        "Python's own source, 8 x 128 tokens per step, 20 steps of warm-up, then cosine to a tenth. State is in bytes",
        "per parameter.",
        "",
        "| optimizer | rate | loss, last 10 steps | held-out loss | median step | state, predicted | measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['rate']:g} | {row['loss']:.3f} | {row['held_out']:.3f} "
            f"| {row['step_ms']:.0f} ms | {row['predicted']:.3f} B | {row['measured']:.3f} B |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
