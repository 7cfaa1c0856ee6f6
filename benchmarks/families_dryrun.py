"""Which causal LM types of the installed transformers dry-run, and how `weft plan` compares.

    python benchmarks/families_dryrun.py --out benchmarks/results/families_dryrun-DATE.md [--only llama gpt2 ...]

Rank 0 of 8 under ZeRO-3, bf16, two rows of 1024 tokens. Sizes are a type's own defaults, cut to three layers (a dense
one and two with experts, often); a default that cannot be cut so is built tiny instead, and marked.
A type is `ran`, `refused` (weft said why) or `failed`.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import platform
import statistics
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from families_train import EXTRA, shrunk, time_limit
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import DryRun, dry_run
from weft.plan.ask import estimate_plan

DEPTH, LENGTH, ROWS, RANKS, LIMIT_S = 3, 1024, 2, 8, 120
VOCABULARY = {"default": 32768, "tiny": 320}
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
          "num_decoder_layers", "num_encoder_layers", "num_blocks")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    model_type: str
    kind: str  # ran | refused | failed
    size: str = ""  # default | tiny
    reason: str = ""
    peak_bytes: int = 0
    predicted_bytes: int = 0
    peak_at: str = ""
    seconds: float = 0.0

    @property
    def error(self) -> float | None:
        return self.predicted_bytes / self.peak_bytes - 1 if self.predicted_bytes else None


def cut(config_class: Any) -> dict[str, Any]:
    """Overrides that leave a few layers of a default config, and a vocabulary of usual size."""
    defaults = config_class().to_dict()
    fields: dict[str, Any] = {key: DEPTH for key in DEPTHS if isinstance(defaults.get(key), int)}
    depths = {defaults[key] for key in fields}
    for key, value in defaults.items():
        if isinstance(value, list) and len(value) in depths and len(value) > DEPTH:
            fields[key] = value[:DEPTH]
    if "vocab_size" in defaults:
        fields["vocab_size"] = VOCABULARY["default"]
    for key, nested in defaults.items():
        if key.endswith("_config") and isinstance(nested, dict) and nested.get("model_type") in CONFIG_MAPPING:
            fields[key] = cut(CONFIG_MAPPING[nested["model_type"]])
    return fields


def try_type(model_type: str) -> Outcome:
    began_s = time.perf_counter()
    first = Outcome(model_type=model_type, kind="failed")
    for size in ("default", "tiny"):
        try:
            with time_limit(LIMIT_S):
                found, predicted = _dry_run(model_type, size)
            return Outcome(
                model_type=model_type, kind="ran", size=size, peak_bytes=found.peak_bytes, predicted_bytes=predicted,
                peak_at=f"{found.peak.phase} {found.peak.operator}", seconds=time.perf_counter() - began_s,
            )  # fmt: skip
        except WeftError as error:
            outcome = Outcome(model_type=model_type, kind="refused", reason=f"{error.code} {error}")
        except Exception as error:  # the point is to list whatever goes wrong
            line = (str(error).strip().splitlines() or [""])[0]
            outcome = Outcome(model_type=model_type, kind="failed", reason=f"{type(error).__name__}: {line[:160]}")
        first = outcome if size == "default" or outcome.kind == "refused" else first
    return first


def _dry_run(model_type: str, size: str) -> tuple[DryRun, int]:
    make = cut if size == "default" else shrunk
    extra = EXTRA.get(model_type, {}) if size == "tiny" else {}
    config = {**make(CONFIG_MAPPING[model_type]), **extra}
    if size == "tiny" and "vocab_size" in CONFIG_MAPPING[model_type]().to_dict():
        config["vocab_size"] = VOCABULARY["tiny"]
    length = LENGTH if size == "default" else 64
    run = RunSpec.from_tables(
        {
            "model": {"type": model_type, "config": config},
            "data": {"sequence_length": length},
            "train": {"global_batch": ROWS * RANKS},
        }
    )
    plan = Plan.from_tables(
        {"mesh": {"dp_shard": RANKS}, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}
    )
    found = dry_run(run, plan)
    try:
        predicted = estimate_plan(run, plan, f"{RANKS}xH200")
    except WeftError:
        return found, 0
    return found, predicted.memory_bytes - predicted.memory_terms.get("framework", 0)


def table(outcomes: list[Outcome], *, total_s: float) -> str:
    counts = Counter(outcome.kind for outcome in outcomes)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None and outcome.size == "default"]
    sizes = sorted(abs(error) for error in errors)
    within = sum(error <= 0.02 for error in sizes)
    lines = [
        f"# Which causal LM types dry-run, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: three layers, so embedding and head weigh more than in a whole model; bf16, ZeRO-3, rank 0 of",
        f"{RANKS}, {ROWS} rows of {LENGTH} tokens. `error` is `weft plan`'s allocated memory against the dry run's.",
        "Models with experts: a dry run has no routing, each expert gets what its code gives it with fake tokens.",
        "",
        f"- Versions: torch {torch.__version__}, transformers {transformers.__version__},"
        f" Python {platform.python_version()}; one core of {platform.machine()}; {total_s:.0f} s in all.",
        "- Command: `OMP_NUM_THREADS=1 python benchmarks/families_dryrun.py --out FILE`",
        f"- {counts['ran']} of {len(outcomes)} ran, {counts['refused']} refused with a sentence,"
        f" {counts['failed']} failed.",
        f"- Planner against dry run, {len(errors)} types at their default size: median"
        f" {statistics.median(sizes):.2%}, {within} within 2%, largest {max(sizes):.1%}." if sizes else "",
        "",
        "| type | outcome | size | dry-run peak, MiB | error of the plan | peak at, or why not | s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for outcome in sorted(outcomes, key=lambda one: (one.kind, one.model_type)):
        error = f"{outcome.error:+.2%}" if outcome.error is not None else ""
        lines.append(
            f"| {outcome.model_type} | {outcome.kind} | {outcome.size} | {outcome.peak_bytes / 2**20:.0f} | {error} |"
            f" {outcome.peak_at or outcome.reason.replace('|', '/')} | {outcome.seconds:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    began_s = time.perf_counter()
    outcomes = []
    for model_type in arguments.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcome = try_type(model_type)
        error = f"{outcome.error:+.2%}" if outcome.error is not None else ""
        print(f"{model_type:24s} {outcome.kind:8s} {outcome.size:8s} {error:9s} {outcome.reason[:150]}", flush=True)
        outcomes.append(outcome)
        if arguments.out:
            arguments.out.write_text(table(outcomes, total_s=time.perf_counter() - began_s))


if __name__ == "__main__":
    main()
