"""Every data-parallel plan of 1, 2 and 4 ranks, verified over structurally different model families.

    python benchmarks/verify_families.py --out benchmarks/results/verify_families-DATE.md [--ranks 1 2] [--only llama]

Each line is `weft verify --all` as a user runs it, on CPU processes. It proves numbers, and says nothing about speed:
the seconds are those of a shared machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
import transformers

ROTARY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MULTI_HEAD = {**ROTARY, "num_key_value_heads": 4}
# family -> (what is special about it, model type, config)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("grouped queries, rotary positions, untied", "llama", ROTARY),
    "qwen3": ("QK-norm, tied embeddings", "qwen3", {**ROTARY, "head_dim": 16, "tie_word_embeddings": True}),
    "gpt2": (
        "learned positions, dropout 0.1, multi-head, tied",
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "gpt_neox": (
        "parallel attention and MLP, partial rotary",
        "gpt_neox",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "cohere": ("parallel blocks, one norm, tied, scaled logits", "cohere", ROTARY),
    "gemma2": (
        "soft-capped logits, sliding and full layers, four norms a block",
        "gemma2",
        {**ROTARY, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
    ),
    "mistral": ("sliding window in every layer", "mistral", {**ROTARY, "sliding_window": 8}),
    "mixtral": ("mixture of 4 experts, 2 a token", "mixtral", {**ROTARY, "num_local_experts": 4}),
    "olmo2": ("norms after attention and MLP, QK-norm", "olmo2", MULTI_HEAD),
    "opt": (
        "learned positions with an offset, biases, ReLU, dropout, tied",
        "opt",
        {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    ),
}  # fmt: skip
COMMAND_LIMIT_S = 1200


@dataclass(frozen=True, kw_only=True)
class Row:
    family: str
    num_ranks: int
    plans: int
    passed: int
    margin: float
    seconds: float
    note: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    rows = []
    for num_ranks in given.ranks:
        for family in given.only:
            rows.append(verify(family, num_ranks=num_ranks, steps=given.steps))
            print(rows[-1], file=sys.stderr, flush=True)
            given.out.write_text(page(rows, steps=given.steps), encoding="utf-8")
    if any(row.passed != row.plans or not row.plans for row in rows):
        raise SystemExit(1)


def verify(family: str, *, num_ranks: int, steps: int) -> Row:
    """`weft verify --all` over a run of this family."""
    _, kind, config = FAMILIES[family]
    run = {
        "model": {"type": kind, "config": config},
        "data": {"source": "python-stdlib", "tokenizer": "bytes", "sequence_length": 32},
        "train": {"steps": 20, "global_batch": 8, "learning_rate": 1e-3, "warmup_steps": 2, "seed": 1},
    }
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(tomli_w.dumps(run), encoding="utf-8")
        command = [sys.executable, "-m", "weft", "verify", str(path), "--all", "--nproc", str(num_ranks), "--json",
                   "--steps", str(steps), "--set", "pipeline.microbatches=2"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    seconds = time.perf_counter() - began_s
    return judged(family, num_ranks, done, seconds)


def judged(family: str, num_ranks: int, done: subprocess.CompletedProcess[str], seconds: float) -> Row:
    if done.returncode not in (0, 1) or not done.stdout:
        note = done.stderr.strip().splitlines()[-2:] or ["no answer"]
        return Row(
            family=family, num_ranks=num_ranks, plans=0, passed=0, margin=0.0, seconds=seconds, note=" ".join(note)
        )
    verdicts = json.loads(done.stdout)["verdicts"]
    wrong = [verdict for verdict in verdicts if not verdict["ok"]]
    notes = [f"{verdict['plan']}: {verdict['first_wrong']}: {_detail(verdict)}" for verdict in wrong]
    return Row(
        family=family,
        num_ranks=num_ranks,
        plans=len(verdicts),
        passed=len(verdicts) - len(wrong),
        margin=max(check["margin"] or 0.0 for verdict in verdicts for check in verdict["checks"]),
        seconds=seconds,
        note="; ".join(notes),
    )


def _detail(verdict: dict[str, Any]) -> str:
    return next(check["detail"] for check in verdict["checks"] if check["name"] == verdict["first_wrong"])


def page(rows: list[Row], *, steps: int) -> str:
    passed, plans = sum(row.passed for row in rows), sum(row.plans for row in rows)
    lines = [
        f"# weft verify over model families, {datetime.date.today()}",
        "",
        "Caveats first: small models (64 wide, 2 layers), CPU processes on one machine with other work on it, float32.",
        "The seconds are no benchmark. `margin` is the largest difference over what is allowed; above 1 would fail.",
        "",
        f"{passed} of {plans} plans pass. {steps} steps, 2 micro-batches, a global batch of 8.",
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores.",
        "",
        "| family | what is special | ranks | plans | pass | margin | seconds | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.family} | {FAMILIES[row.family][0]} | {row.num_ranks} | {row.plans} | {row.passed} | {row.margin:.3f} "
        f"| {row.seconds:.0f} | {row.note.replace('|', '/')} |"
        for row in rows
    ]
    lines += ["", "Reproduce: `python benchmarks/verify_families.py --out table.md`", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
