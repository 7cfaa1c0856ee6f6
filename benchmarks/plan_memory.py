"""What `weft plan` predicts against what one GPU measures: peak allocated memory and time of the engine's own step.

    python benchmarks/plan_memory.py [--out results.md] [--only bf16]

One rank, so no collective travels; shapes are real models with fewer layers where the whole would not fit.
Predicted memory is without the `framework` term, which lies outside the allocator.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import shapes
import torch
from shapes import COHERE, GPT2_XL, LLAMA_1B, MISTRAL_4L, NEOX, OLMO2_1B, QWEN2_1B, QWEN3_2B

import weft
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim.optimizers import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.plan.ask import estimate_plan
from weft.plan.estimate import Estimate

QWEN3 = {**QWEN3_2B, "num_hidden_layers": 14}
GPT2 = {**GPT2_XL, "n_layer": 24}
MIXTRAL = {**shapes.MIXTRAL, "num_hidden_layers": 8}
GEMMA2 = {**shapes.GEMMA2, "num_hidden_layers": 8}
OLMO2 = {**OLMO2_1B, "num_hidden_layers": 12}
PHI3 = {**shapes.PHI3, "num_hidden_layers": 8}
QWEN2 = {**QWEN2_1B, "num_hidden_layers": 14}
STARCODER2 = {**shapes.STARCODER2, "num_hidden_layers": 10}
OLMOE = {**shapes.OLMOE, "num_hidden_layers": 4}
STABLELM = {**shapes.STABLELM, "num_hidden_layers": 12}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    kind: str
    config: dict[str, Any]
    rows: int
    length: int
    plan: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"


BF16 = {"precision": {"preset": "bf16"}}
BF16_ZERO3 = {**BF16, "data_parallel": {"zero": 3}}
CASES = [
    Case(name="llama 1B bf16 2x4096", kind="llama", config=LLAMA_1B, rows=2, length=4096, plan=BF16),
    Case(name="llama 1B bf16 ZeRO-3 2x4096", kind="llama", config=LLAMA_1B, rows=2, length=4096, plan=BF16_ZERO3),
    Case(
        name="llama 1B bf16 ZeRO-3 4x4096, 4 micro-batches", kind="llama", config=LLAMA_1B, rows=4, length=4096,
        plan={**BF16_ZERO3, "pipeline": {"microbatches": 4}},
    ),
    Case(name="llama 1B bf16 ZeRO-3 sgd", kind="llama", config=LLAMA_1B, rows=2, length=4096, plan=BF16_ZERO3,
         optimizer="sgd"),
    Case(name="qwen3 tied bf16 ZeRO-3 2x4096", kind="qwen3", config=QWEN3, rows=2, length=4096, plan=BF16_ZERO3),
    Case(name="gpt2 bf16 ZeRO-3 4x2048", kind="gpt2", config=GPT2, rows=4, length=2048, plan=BF16_ZERO3),
    Case(name="gpt2 fp32 2x1024", kind="gpt2", config=GPT2, rows=2, length=1024),
    Case(name="mixtral bf16 ZeRO-3 2x2048", kind="mixtral", config=MIXTRAL, rows=2, length=2048, plan=BF16_ZERO3),
    Case(name="gemma2 bf16 ZeRO-3 1x4096", kind="gemma2", config=GEMMA2, rows=1, length=4096, plan=BF16_ZERO3),
    Case(name="olmo2 bf16 2x4096", kind="olmo2", config=OLMO2, rows=2, length=4096, plan=BF16),
    Case(name="gpt_neox bf16 ZeRO-3 2x2048", kind="gpt_neox", config=NEOX, rows=2, length=2048, plan=BF16_ZERO3),
    # predicted and written down before they were first run
    Case(name="blind: phi3 bf16 ZeRO-3 2x4096", kind="phi3", config=PHI3, rows=2, length=4096, plan=BF16_ZERO3),
    Case(name="blind: mistral bf16 1x16384", kind="mistral", config=MISTRAL_4L, rows=1, length=16384, plan=BF16),
    Case(name="blind: qwen2 bf16 ZeRO-2 4x4096, 2 micro-batches", kind="qwen2", config=QWEN2, rows=4, length=4096,
         plan={**BF16, "data_parallel": {"zero": 2}, "pipeline": {"microbatches": 2}}),
    Case(name="blind: starcoder2 bf16 ZeRO-1 4x2048", kind="starcoder2", config=STARCODER2, rows=4, length=2048,
         plan={**BF16, "data_parallel": {"zero": 1}}),
    Case(name="blind: cohere bf16 ZeRO-3 2x2048", kind="cohere", config=COHERE, rows=2, length=2048, plan=BF16_ZERO3),
    Case(name="blind: olmoe bf16 ZeRO-3 2x2048", kind="olmoe", config=OLMOE, rows=2, length=2048, plan=BF16_ZERO3),
    Case(name="blind: stablelm bf16 2x4096", kind="stablelm", config=STABLELM, rows=2, length=4096, plan=BF16),
    Case(name="blind: llama fp32 1x2048", kind="llama", config=LLAMA_1B, rows=1, length=2048),
]  # fmt: skip


def measured(case: Case) -> tuple[int, float]:
    """(peak bytes allocated, median seconds) of steps after the first."""
    device = torch.device("cuda", 0)
    config = build_config(ModelSpec(type=case.kind, config=case.config), vocab_size=case.config["vocab_size"])
    skeleton = build_skeleton(config)
    engine = Engine(
        build_skeleton(config),
        Plan.from_tables(case.plan),
        optimizer=OptimizerPolicy(kind=case.optimizer, learning_rate=1e-4),  # type: ignore[arg-type]
        weights=InitialWeights(skeleton, describe(skeleton), seed=0, device=device),
        device=device,
    )
    tokens = torch.randint(0, case.config["vocab_size"], (case.rows, case.length + 1), device=device)
    batch = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    engine.step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(4):
        began_s = time.perf_counter()
        engine.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return torch.cuda.max_memory_allocated(), statistics.median(seconds)


def predicted(case: Case, devices: str) -> Estimate:
    spec = {"model": {"type": case.kind, "config": case.config}}
    run = weft.RunSpec.from_tables(
        {
            **spec,
            "data": {"sequence_length": case.length},
            "train": {"global_batch": case.rows, "optimizer": case.optimizer},
        }
    )
    return estimate_plan(run, Plan.from_tables(case.plan), devices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out")
    parser.add_argument("--only", default="")
    parser.add_argument("--devices", default="H200")
    parser.add_argument("--predict", action="store_true", help="only predict; needs no GPU")
    given = parser.parse_args()
    lines = ["| case | predicted GiB | measured GiB | error | predicted ms | measured ms | error |", "|" + " --- |" * 7]
    for case in (case for case in CASES if given.only in case.name):
        guess = predicted(case, given.devices)
        inside = (guess.memory_bytes - guess.memory_terms["framework"]) / 2**30
        row = f"| {case.name} | {inside:.2f} | "
        if not given.predict:
            try:
                peak, seconds = measured(case)
                peak_gib = peak / 2**30
                row += (
                    f"{peak_gib:.2f} | {inside / peak_gib - 1:+.1%} | {guess.step_s * 1e3:.0f} | {seconds * 1e3:.0f} | "
                )
                row += f"{guess.step_s / seconds - 1:+.1%} |"
            except Exception as error:
                row += f"{type(error).__name__}: {str(error)[:80]} |"
            gc.collect()
            torch.cuda.empty_cache()
        lines.append(row)
        print(row, {k: round(v / 2**20) for k, v in guess.memory_terms.items() if v}, guess.peak_at, flush=True)
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
