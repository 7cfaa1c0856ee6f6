"""The formulas against the peaks that an H200 allocated (benchmarks/results/plan_memory-2026-11-15-h200.md)."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_folder import benchmarks_importable
from compiled_peaks import MEASURED, case_of

from weft.plan.ask import estimate_plan

with benchmarks_importable():
    import plan_memory

MEASURED_GIB = {
    "llama 1B bf16 2x4096": 44.25,
    "llama 1B bf16 ZeRO-3 2x4096": 41.95,
    "llama 1B bf16 ZeRO-3 4x4096, 4 micro-batches": 36.92,
    "llama 1B bf16 ZeRO-3 sgd": 36.36,
    "qwen3 tied bf16 ZeRO-3 2x4096": 37.50,
    "gpt2 bf16 ZeRO-3 4x2048": 30.50,
    "gpt2 fp32 2x1024": 18.76,
    "mixtral bf16 ZeRO-3 2x2048": 13.07,
    "gemma2 bf16 ZeRO-3 1x4096": 40.69,
    "olmo2 bf16 2x4096": 39.17,
    "gpt_neox bf16 ZeRO-3 2x2048": 18.22,
    "blind: phi3 bf16 ZeRO-3 2x4096": 25.15,
    "blind: mistral bf16 1x16384": 33.45,
    "blind: qwen2 bf16 ZeRO-2 4x4096, 2 micro-batches": 40.90,
    "blind: starcoder2 bf16 ZeRO-1 4x2048": 25.80,
    "blind: cohere bf16 ZeRO-3 2x2048": 27.13,
    "blind: olmoe bf16 ZeRO-3 2x2048": 31.10,
    "blind: stablelm bf16 2x4096": 29.64,
    "blind: llama fp32 1x2048": 34.29,
}
PEAK_IN_EXPERTS = "blind: olmoe bf16 ZeRO-3 2x2048"  # the one known miss: 3% low


@pytest.mark.parametrize("case", plan_memory.CASES, ids=lambda case: case.name)
def test_a_predicted_peak_is_the_measured_one(case: Any) -> None:
    guess = plan_memory.predicted(case, "H200")
    inside = (guess.memory_bytes - guess.memory_terms["framework"]) / 2**30
    allowed = 0.035 if case.name == PEAK_IN_EXPERTS else 0.01
    assert inside == pytest.approx(MEASURED_GIB[case.name], rel=allowed)


@pytest.mark.parametrize("name", MEASURED)
def test_compiled_blocks_with_a_fused_loss_are_foreseen(name: str) -> None:
    run, plan = case_of(name)
    guess = estimate_plan(run, plan, f"{plan.num_ranks}xH200")
    inside = guess.memory_bytes - guess.memory_terms["framework"]
    assert inside == pytest.approx(MEASURED[name], rel=0.01)
