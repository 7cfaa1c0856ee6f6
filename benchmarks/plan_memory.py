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

import torch

import weft
from weft.core.plan import Plan
from weft.core.run_spec import ModelSpec
from weft.engine.engine import Engine
from weft.engine.optim import OptimizerPolicy
from weft.models.build import build_config, build_skeleton
from weft.models.initial import InitialWeights
from weft.models.layout import describe
from weft.plan.ask import estimate_plan
from weft.plan.estimate import Estimate

LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3 = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 14, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"n_embd": 1600, "n_layer": 24, "n_head": 25, "n_positions": 2048, "vocab_size": 50257,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
}  # fmt: skip
GEMMA2 = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000,
}  # fmt: skip
OLMO2 = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 100352,
}  # fmt: skip
NEOX = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 16,
    "vocab_size": 50432,
}  # fmt: skip


PHI3 = {
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32064, "pad_token_id": 0, "sliding_window": None,
}  # fmt: skip
MISTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN2 = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 14, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
STARCODER2 = {
    "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 10, "num_attention_heads": 24,
    "num_key_value_heads": 2, "vocab_size": 49152, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    "attention_dropout": 0.0, "sliding_window": None,
}  # fmt: skip
COHERE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 256000,
}  # fmt: skip
OLMOE = {
    "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304,
}  # fmt: skip
STABLELM = {
    "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 12, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 50304, "attention_dropout": 0.0,
}  # fmt: skip


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
    Case(name="blind: mistral bf16 1x16384", kind="mistral", config=MISTRAL, rows=1, length=16384, plan=BF16),
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
