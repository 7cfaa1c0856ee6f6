"""Load of experts with and without balancing: 300 steps on the text of Python's standard library, one process.

    python benchmarks/router_balance.py [--steps 300] [--out FILE]

Load is the tokens of a layer's busiest expert over the layer's mean. The verdict is the mean of the last 50 steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import weft
import weft.train
from weft.core.run_spec import RunSpec

_ROTARY = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = {**_ROTARY, "head_dim": 12, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {
    **_ROTARY, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 0, "intermediate_size": 64,
    "q_lora_rank": 24, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
CASES: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("qwen3_moe", QWEN, {}),
    ("qwen3_moe", QWEN, {"balance_loss": 0.05}),
    ("deepseek_v3", DEEPSEEK, {}),
    ("deepseek_v3", DEEPSEEK, {"bias_rate": 0.01}),
]
LAST = 50  # steps


def train(model_type: str, config: dict[str, Any], router: dict[str, float], *, steps: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    run = RunSpec.from_tables(
        {
            "model": {"type": model_type, "config": config},
            "data": {"source": "python-stdlib", "sequence_length": 64},
            "train": {"steps": steps, "global_batch": 32, "learning_rate": 2e-3},
            "router": router,
            "evaluation": {"every": 0},
            "checkpoint": {"every": 0, "at_end": False},
            "logging": {"tensorboard": False},
            "ledger": {"measure": False, "dry_run": False},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        weft.train(run, out=Path(folder) / "run", quiet=True)
        text = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def row(model_type: str, router: dict[str, float], lines: list[dict[str, Any]]) -> str:
    def last(key: str) -> float:
        return statistics.mean(line[key] for line in lines[-LAST:])

    keys = ", ".join(f"{key} = {value}" for key, value in router.items()) or "none"
    loads = " ".join(f"{lines[min(at, len(lines)) - 1]['expert_load']:.2f}" for at in (1, 50, 100, 200, 300))
    return (
        f"| {model_type} | {keys} | {loads} | {last('expert_load'):.2f} | {last('expert_load_max'):.2f} "
        f"| {last('expert_entropy'):.3f} | {last('dead_experts'):.1f} | {last('loss'):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    began_s = time.perf_counter()
    rows = [row(kind, router, train(kind, config, router, steps=given.steps)) for kind, config, router in CASES]
    text = "\n".join(
        [
            f"- Versions: torch {torch.__version__}, transformers {transformers.__version__}, "
            f"Python {platform.python_version()}; {time.perf_counter() - began_s:.0f} s on {platform.machine()}.",
            f"- Command: `python benchmarks/router_balance.py --steps {given.steps}`",
            "",
            f"| model | [router] | load at step 1 50 100 200 300 | load, last {LAST} | worst layer | entropy "
            "| dead experts | loss |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
        ]
    )
    print(text)
    if given.out is not None:
        given.out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
