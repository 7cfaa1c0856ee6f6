"""A step with expert parallelism against ZeRO-3 without it: the same mixture on the same two Gloo ranks, in turns.

    OMP_NUM_THREADS=1 python benchmarks/expert_overhead.py [--rounds 15] [--out FILE]

Without ep every rank gathers all experts and computes its own tokens; with ep 2 it holds half of them and tokens
travel. Engines live in the same processes and take turns step by step, in an order that changes every round, with a
barrier before each; figures are medians on rank 0. The losses must agree.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from weft.core.plan import Plan
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy

CONFIG = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_experts": 32, "num_experts_per_tok": 4,
    "vocab_size": 512,
}  # fmt: skip
ROWS, LENGTH, WARMUP = 4, 128, 2
SIDES: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 2}},
    **{
        f"ep 2, {kind}": {"mesh": {"dp_shard": 2, "ep": 2}, "expert_parallel": {"dispatcher": kind}}
        for kind in ("pairs", "tokens", "gather")
    },
}


def measure(rank: int, _world: int, rounds: int) -> dict[str, tuple[float, list[float]]]:
    engines = {name: _engine(plan) for name, plan in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    losses: dict[str, list[float]] = {name: [] for name in SIDES}
    names = list(SIDES)
    for number in range(WARMUP + rounds):
        ids = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2 * number + rank))
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            began = time.perf_counter()
            losses[name].append(engines[name].step({"input_ids": ids, "labels": ids}).loss)
            seconds[name].append(time.perf_counter() - began)
    return {name: (statistics.median(seconds[name][WARMUP:]), losses[name]) for name in SIDES}


def _engine(plan: dict[str, Any]) -> Engine:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **CONFIG))
    tables = {"data_parallel": {"zero": 3}, **plan}
    return Engine(model, Plan.from_tables(tables), optimizer=OptimizerPolicy(), seed=0, clip_norm=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each side")
    parser.add_argument("--out", type=Path, help="the page")
    given = parser.parse_args()
    found = run_ranks(measure, 2, given.rounds, timeout_s=1200)[0]
    base_s, base = found["ZeRO-3"]
    lines = [
        f"# A step with expert parallelism against ZeRO-3 on two Gloo ranks, {datetime.date.today().isoformat()}", "",
        "Caveats: two CPU processes on two cores, a small mixture in float32; a link as fast as memory, so what",
        "travels costs copies. Median steps in turns (`benchmarks/expert_overhead.py`).", "",
        f"- torch {torch.__version__}, {platform.machine()}, {given.rounds} rounds; Qwen3-MoE of {CONFIG}",
        f"- {ROWS} x {LENGTH} tokens per rank", "",
        "| layout | step, ms | over ZeRO-3's | largest difference of a loss |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, (seconds, losses) in found.items():
        worst = max(abs(one - other) for one, other in zip(losses, base, strict=True))
        lines.append(f"| {name} | {seconds * 1e3:.1f} | {seconds / base_s:.3f} | {worst:.1e} |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
