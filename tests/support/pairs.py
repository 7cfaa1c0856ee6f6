"""Pairs of answers as a JSONL file, and the settings of a tiny run on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_WORDS = ("warp", "weft", "loom", "shuttle", "thread", "cloth", "heddle", "reed")


def write_pairs(path: Path, *, count: int = 20) -> Path:
    draw = random.Random(5)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            texts = [" ".join(draw.choices(_WORDS, k=draw.randint(1, 3))) for _ in range(3)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")
    return path


def pair_settings(**objective: Any) -> dict[str, Any]:
    """For `tiny_run.run_tables`; the corpus is the file of pairs."""
    return {
        "data.format": "preference",
        "data.sequence_length": 64,
        "data.eval_fraction": 0.0,
        "objective": {"kind": "dpo", **objective},
        "train.steps": 6,
        "train.global_batch": 4,
        "evaluation.every": 0,
        "logging.tensorboard": False,
    }
