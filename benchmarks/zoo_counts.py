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
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "zoo"))

import torch
import transformers
from meta_models import RefusedError, build, differences, draw
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from weft import zoo
from weft.core.errors import WeftError
from weft.core.model_shape import ModelShape

# why a type has no family of its own
_WHY = {
    "blt": "four transformers over bytes and patches, not one stack of blocks",
    "git": "an image tower beside the text; the text part is a BERT",
    "qwen4_exp": "n-gram tables and low-rank hyper-connections are not described yet",
    "qwen4_exp_text": "n-gram tables and low-rank hyper-connections are not described yet",
    "xlm": "its layers are spread over four lists of modules, so there is no block",
}


@dataclass(frozen=True)
class Verdict:
    """`exact` (all compared models agree), `near` (an approximate shape, with its error), `unknown` or `not built`."""

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
    configs: list[dict[str, Any]] = [{}, *(draw(model_type, rng, flags=index > 0) for index in range(draws))]
    for sizes in configs:
        try:
            model = build(model_type, sizes)
        except RefusedError as error:
            refusals.append(str(error).split("\n")[0])
            continue
        total = sum(parameter.numel() for parameter in model.parameters())
        size = size or total
        try:
            shape = zoo.shape_from_type(model_type, sizes)
        except WeftError as error:
            return Verdict(model_type, "unknown", 0, total, 0, _WHY.get(model_type, error.message))
        wrong = differences(model, shape)
        if wrong or not shape.is_exact:
            return near(model_type, shape, total, wrong)
        compared += 1
    if not compared:
        return Verdict(model_type, "not built", reason=f"transformers refuses: {refusals[0][:120]}")
    return Verdict(model_type, "exact", compared, size)


def near(model_type: str, shape: ModelShape, total: int, wrong: list[str]) -> Verdict:
    reason = "; ".join((*shape.notes, *([_WHY[model_type]] if model_type in _WHY else ()))) or "; ".join(wrong[:2])
    outcome = "near" if not shape.is_exact else "WRONG"
    return Verdict(model_type, outcome, 1, total, shape.num_parameters - total, reason)


def render(verdicts: list[Verdict], *, draws: int, elapsed_s: float) -> str:
    counts = Counter(verdict.outcome for verdict in verdicts)
    ordered = sorted(verdicts, key=lambda verdict: (verdict.outcome == "exact", verdict.outcome, verdict.model_type))
    lines = [
        f"# Whose parameters are counted exactly, {datetime.date.today().isoformat()}",
        "",
        "Caveats: the default config of a type and small random ones stand for all its configs; a combination of flags",
        "that was never drawn may differ. A type that reads images or sound besides text is counted as its language",
        "model alone, and says so (`near`). `exact`: the total, every layer, every parameter's name and size.",
        "",
        f"- WeightStash: torch {torch.__version__}, transformers {transformers.__version__}, "
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
    difference = f"{verdict.difference:+,}" if verdict.outcome in ("near", "WRONG") else ""
    reason = verdict.reason.replace("|", "/").replace("\n", " ")
    return f"| {verdict.model_type} | {verdict.outcome} | {verdict.compared} | {size} | {difference} | {reason} |"


if __name__ == "__main__":
    main()
