"""Whose parameters does weft count exactly? Every causal-LM type of the installed transformers against the built model.

    python benchmarks/zoo_counts.py --out benchmarks/results/zoo_counts-DATE.md [--draws 8] [--only llama gpt2 ...]

Each type is built on the meta device with its default config and with sizes and flags drawn at random (seeded), and
its shape is compared: the total, each layer, and each matrix, norm and extra by name. It says nothing about speed.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import platform
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
import transformers
from meta_models import RefusedError, build, differences, draw
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft.models.shape.derive import shape_of_model


@dataclass(frozen=True)
class Verdict:
    """`exact` (all compared models agree), `WRONG`, or `not built` by transformers."""

    model_type: str
    outcome: str
    compared: int = 0
    parameters: int = 0
    difference: int = 0
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    quieten()
    start = time.perf_counter()
    verdicts = [judge(name, draws=chosen.draws) for name in chosen.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)]
    text = render(verdicts, draws=chosen.draws, elapsed_s=time.perf_counter() - start)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text, encoding="utf-8")


def quieten() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()


def judge(model_type: str, *, draws: int) -> Verdict:
    """The default config first, then the drawn ones; the first that differs decides."""
    rng, refusals, compared, size = random.Random(model_type), [], 0, 0
    for index in range(draws + 1):
        try:
            sizes = draw(model_type, rng, flags=index > 1) if index else {}
            model = build(model_type, sizes)
        except RefusedError as error:
            refusals.append(str(error).split("\n")[0])
            continue
        total = sum(parameter.numel() for parameter in model.parameters())
        size = size or total
        shape = shape_of_model(model)
        wrong = differences(model, shape)
        if wrong or not shape.is_exact:
            return Verdict(model_type, "WRONG", 1, total, shape.num_parameters - total, "; ".join(wrong[:2]))
        compared += 1
    if not compared:
        return Verdict(model_type, "not built", reason=f"transformers refuses: {refusals[0][:120]}")
    return Verdict(model_type, "exact", compared, size)


def render(verdicts: list[Verdict], *, draws: int, elapsed_s: float) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    ordered = sorted(verdicts, key=lambda verdict: (verdict.outcome == "exact", verdict.outcome, verdict.model_type))
    lines = [
        f"# Whose parameters are counted exactly, {datetime.date.today().isoformat()}",
        "",
        "Shapes are derived from the models themselves, so this judges the derivation: the total, every block, every",
        "parameter's name and size, each parameter once. The default config of a type and small random ones are built.",
        "",
        f"- Versions: torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}; "
        f"{elapsed_s:.0f} s on one core of {platform.machine()}, nothing but the meta device.",
        f"- Command: `python benchmarks/zoo_counts.py --draws {draws} --out FILE`",
        f"- {', '.join(f'{count} {outcome}' for outcome, count in sorted(counts.items()))}, of {len(verdicts)} types.",
        "",
        "| type | outcome | models compared | parameters (first) | difference | reason |",
        "| --- | --- | --- | --- | --- | --- |",
        *(row(verdict) for verdict in ordered),
    ]
    return "\n".join(lines) + "\n"


def row(verdict: Verdict) -> str:
    size = f"{verdict.parameters:,}" if verdict.parameters else ""
    difference = f"{verdict.difference:+,}" if verdict.outcome == "WRONG" else ""
    reason = verdict.reason.replace("|", "/").replace("\n", " ")
    return f"| {verdict.model_type} | {verdict.outcome} | {verdict.compared} | {size} | {difference} | {reason} |"


if __name__ == "__main__":
    main()
