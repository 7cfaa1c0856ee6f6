"""`weft plan`'s memory against the dry run's, term by term, over a sampled product of families and plans.

    python benchmarks/plan_vs_dryrun.py --cases 120 --out benchmarks/results/plan_vs_dryrun-DATE.md
    python benchmarks/plan_vs_dryrun.py --compiled --cases 28 --out benchmarks/results/plan_vs_dryrun-compiled-DATE.md
    python benchmarks/plan_vs_dryrun.py --experts --cases 16 --out benchmarks/results/plan_vs_dryrun-experts-DATE.md

`--compiled`: what a GPU takes by itself, compiled blocks and a fused loss in bf16.
`--experts`: expert parallelism, three blocks of published widths, with every dispatcher and tensor parallelism.

Families x ZeRO x ranks x recompute x sequence x micro-batch x micro-batches x optimizer x precision, drawn by a seed.
No GPU and no measurement here: it tests the formulas, not the world. Six layers of each family without `--experts`.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import random
import statistics
import time
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.core.errors import WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import DryRun, dry_run
from weft.plan.ask import estimate_plan

DENSE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "mistral": {**DENSE, "sliding_window": None},
    "qwen2": DENSE,
    "qwen3": {**DENSE, "head_dim": 64, "tie_word_embeddings": True},
    "gemma2": {**DENSE, "head_dim": 128, "num_attention_heads": 8},
    "phi3": {**DENSE, "pad_token_id": 0},
    "olmo2": DENSE,
    "granite": DENSE,
    "cohere": DENSE,
    "stablelm": DENSE,
    "gpt_neox": {key: value for key, value in DENSE.items() if key != "num_key_value_heads"},
    "gpt2": {"n_embd": 1024, "n_layer": 6, "n_head": 16, "n_positions": 8192, "vocab_size": 32000},
    "mixtral": {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {**DENSE, "intermediate_size": 512, "num_experts": 16, "num_experts_per_tok": 4},
}  # fmt: skip
EXPERTS = {**DENSE, "moe_intermediate_size": 512, "num_experts_per_tok": 4}
LATENT = {
    **EXPERTS, "n_routed_experts": 16, "num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
MIXED: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "gpt_oss": {
        **DENSE, "intermediate_size": 512, "head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4,
    },
    "glm4_moe": {**EXPERTS, "n_routed_experts": 16, "head_dim": 64, "first_k_dense_replace": 1},
    "qwen3_moe": {**EXPERTS, "num_experts": 16, "head_dim": 64},
    "qwen3_next": {**EXPERTS, "num_experts": 16, "head_dim": 64, "full_attention_interval": 3},
    "gemma3_text": {**DENSE, "head_dim": 64},
    "mamba2": {"hidden_size": 1024, "num_hidden_layers": 6, "vocab_size": 32000, "num_heads": 32, "head_dim": 64},
    "falcon": {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "vocab_size": 32000},
    "bloom": {"hidden_size": 1024, "n_layer": 6, "n_head": 16, "vocab_size": 32000},
    "phimoe": {**DENSE, "intermediate_size": 512, "num_local_experts": 16, "num_experts_per_tok": 4},
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {  # widths of published models; DeepSeek-V3's are halved
    "mixtral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000, "sliding_window": None,
    },
    "qwen3_moe": {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    },
    "deepseek_v3": {
        "hidden_size": 4096, "moe_intermediate_size": 1024, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 1, "vocab_size": 129280,
    },
    "gpt_oss": {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
    },
}  # fmt: skip
TENSORS = [(1, "folded", False), (1, "folded", False), (2, "folded", False), (2, "folded", True), (2, "width", False)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    family: str
    name: str
    dry: DryRun
    predicted: dict[str, int]

    @property
    def error(self) -> float:
        return sum(self.predicted.values()) / self.dry.peak_bytes - 1


def draw(rng: random.Random, family: str, *, is_compiled: bool) -> tuple[str, RunSpec, Plan]:
    ranks, zero = rng.choice([1, 4, 8, 64]), rng.choice([0, 1, 2, 3, 3])
    microbatches, rows, length = rng.choice([1, 1, 2, 4]), rng.choice([1, 2, 4]), rng.choice([512, 1024, 2048, 4096])
    policy = rng.choice(["none", "none", "full"] if is_compiled else ["none", "none", "selective", "full"])
    optimizer, precision = rng.choice(["adamw", "adamw", "sgd", "adamw8bit"]), rng.choice(["bf16", "bf16", "fp32"])
    precision = "bf16" if is_compiled else precision
    run = RunSpec.from_tables(
        {
            "model": {"type": family, "config": {**FAMILIES, **MIXED}[family]},
            "data": {"sequence_length": length},
            "train": {"global_batch": ranks * rows * microbatches, "optimizer": optimizer},
        }
    )
    plan = Plan.from_tables(
        {
            "mesh": {"dp_shard" if zero else "dp_replicate": ranks},
            "data_parallel": {"zero": zero},
            "pipeline": {"microbatches": microbatches},
            "precision": {"preset": precision},
            "activations": {"policy": policy},
            "compile": {"enabled": is_compiled},
            "kernels": {"loss": "fused" if is_compiled else "whole"},
        }
    )
    name = f"ZeRO-{zero} of {ranks}, {microbatches} x {rows}x{length}, {policy}, {optimizer}, {precision}"
    return name, run, plan


def draw_experts(rng: random.Random, family: str) -> tuple[str, RunSpec, Plan]:
    ep, dispatcher, zero = rng.choice([2, 4]), rng.choice(["pairs", "tokens", "gather"]), rng.choice([1, 3])
    policy, precision = rng.choice(["none", "none", "full", "selective"]), rng.choice(["bf16", "bf16", "fp32"])
    tp, tensor, is_sequence_parallel = rng.choice(TENSORS)
    (rows, length), times = rng.choice([(1, 2048), (2, 2048), (1, 4096)]), rng.choice([1, 2])
    microbatches = rng.choice([1, 1, 2])
    if family == "gpt_oss" and policy == "selective":  # its experts write into the output of a product
        policy = "none"
    ranks = max(2, times * (ep // tp if tensor == "folded" else ep))
    config = {**PUBLISHED[family], "num_hidden_layers": 3, "max_position_embeddings": 8192}
    run = RunSpec.from_tables(
        {
            "model": {"type": family, "config": config},
            "data": {"sequence_length": length},
            "train": {"global_batch": ranks * rows * microbatches},
        }
    )
    plan = Plan.from_tables(
        {
            "mesh": {"dp_shard": ranks, "tp": tp, "ep": ep},
            "data_parallel": {"zero": zero},
            "tensor_parallel": {"sequence_parallel": is_sequence_parallel},
            "expert_parallel": {"dispatcher": dispatcher, "tensor": tensor},
            "pipeline": {"microbatches": microbatches},
            "precision": {"preset": precision},
            "activations": {"policy": policy},
            "compile": {"enabled": False},
            "kernels": {"loss": "whole"},
        }
    )
    tensors = f", tp {tp} {tensor}{' with SP' if is_sequence_parallel else ''}" if tp > 1 else ""
    name = f"ZeRO-{zero} of {ranks}, ep {ep} by {dispatcher}{tensors}, {microbatches} x {rows}x{length}, {policy}"
    return f"{name}, {precision}", run, plan


def try_case(family: str, name: str, run: RunSpec, plan: Plan) -> Outcome:
    found = dry_run(run, plan)
    estimate = estimate_plan(run, plan, f"{plan.num_ranks}xH200")
    predicted = {term: nbytes for term, nbytes in estimate.memory_terms.items() if term != "framework"}
    return Outcome(family=family, name=name, dry=found, predicted=predicted)


def table(outcomes: list[Outcome], refused: list[str], *, command: str, total_s: float) -> str:
    sizes = sorted(abs(outcome.error) for outcome in outcomes)
    lines = [
        f"# The planner's memory against the dry run's, {datetime.date.today():%Y-%m-%d}",
        "",
        "Caveats: few layers, so embedding and head weigh more than in a whole model, and moments that a deep model",
        "would never peak at are tried too. `temporaries` and `gathered_weights` name the flat buffer of a gather",
        "differently; their sum is what counts.",
        "",
        f"- torch {torch.__version__}, transformers {transformers.__version__}; {total_s:.0f} s on one core.",
        f"- Command: `OMP_NUM_THREADS=1 {command}`",
        f"- {len(outcomes)} cases: median {statistics.median(sizes):.2%}, 95th percentile"
        f" {sizes[int(0.95 * (len(sizes) - 1))]:.2%}, worst {sizes[-1]:.2%};"
        f" {sum(size <= 0.02 for size in sizes)} within 2%.",
        *[f"- not run: {reason}" for reason in refused],
        "",
        "| family | cases | median | worst | within 2% |",
        "| --- | --- | --- | --- | --- |",
    ]
    families: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        families[outcome.family].append(outcome)
    for family, some in sorted(families.items()):
        errors = [abs(outcome.error) for outcome in some]
        within = sum(error <= 0.02 for error in errors)
        lines.append(f"| {family} | {len(some)} | {statistics.median(errors):.2%} | {max(errors):.2%} | {within} |")
    lines += [
        "",
        "Worse than 2%:",
        "",
        "| family | case | dry run, MiB | error | peak at |",
        "| --- | --- | --- | --- | --- |",
    ]
    for outcome in sorted(outcomes, key=lambda one: -abs(one.error)):
        if abs(outcome.error) > 0.02:
            peak = outcome.dry.peak
            lines.append(
                f"| {outcome.family} | {outcome.name} | {peak.peak_bytes / 2**20:.0f} | {outcome.error:+.2%} |"
                f" {peak.phase} {peak.module} {peak.operator} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="experts, latent attention, state spaces, other attention")
    parser.add_argument("--experts", action="store_true", help="expert parallelism")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rng, began_s = random.Random(given.seed), time.perf_counter()
    families = list(PUBLISHED if given.experts else MIXED if given.mixed else FAMILIES)
    outcomes: list[Outcome] = []
    refused: list[str] = []
    for index in range(given.cases):
        family = families[index % len(families)]
        case = draw_experts(rng, family) if given.experts else draw(rng, family, is_compiled=given.compiled)
        try:
            outcome = try_case(family, *case)
        except (WeftError, RuntimeError) as error:  # torch refuses some models with selective recompute
            refused.append(f"{family}, {case[0]}: {error}")
            continue
        outcomes.append(outcome)
        terms = {key: outcome.predicted.get(key, 0) - value for key, value in outcome.dry.terms.items()}
        off = {key: round(value / 2**20) for key, value in terms.items() if abs(value) > 0.01 * outcome.dry.peak_bytes}
        print(f"{outcome.error:+.2%} {family} {outcome.name} {off if abs(outcome.error) > 0.01 else ''}", flush=True)
        if given.out:
            kinds = "".join(f"--{key} " for key in ("compiled", "mixed", "experts") if getattr(given, key))
            options = f"{kinds}--cases {given.cases} --seed {given.seed}"
            command = f"python benchmarks/plan_vs_dryrun.py {options}"
            given.out.write_text(table(outcomes, refused, command=command, total_s=time.perf_counter() - began_s))


if __name__ == "__main__":
    main()
