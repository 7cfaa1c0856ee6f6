"""The planner against published runs: step times within the stated error, and published layouts near the best found.

The table of runs is tests/support/published_runs.toml, `benchmarks/published_runs.py` prints this comparison.
"""

import statistics
from functools import cache
from typing import Any

import pytest
from plan_cases import request_of
from published_plans import (
    Comparison,
    by_framework,
    comparable_runs,
    compare,
    float8_runs,
    median_size,
    plan_of_run,
    request_of_run,
)

from weft.plan.plan_rows import columns_of
from weft.plan.rules import check_plan
from weft.plan.search import search
from weft.plan.space import Freedom

COMPARISONS = [compare(run) for run in comparable_runs()]
IN_FLOAT8 = [compare(run) for run in float8_runs()]
GOAL = 0.15

# Medians of the signed errors may lie in these bands. The lower bounds of the last group are wide on purpose: their
# published steps contain costs that no formula here has, see benchmarks/published_runs.py.
BANDS = {
    "Megatron-LM": (-0.15, 0.10),
    "NeMo (Megatron-Core)": (-0.10, 0.10),
    "llm-foundry": (-0.10, 0.12),
    "Meta's own": (-0.15, 0.30),
    "torchtitan": (-0.28, 0.15),
    "fms-fsdp": (-0.35, 0.15),
    "Megatron-DeepSpeed": (-0.40, 0.15),
    "Megatron-Bridge": (-0.55, 0.15),
    "DeepSpeed ZeRO-3": (-0.65, 0.15),
}


def test_at_least_twelve_confirmed_runs_have_a_source() -> None:
    assert len(COMPARISONS) >= 90  # a run that stops being comparable must not pass unseen
    assert all(each.run.source for each in COMPARISONS)
    assert len({each.run.source for each in COMPARISONS}) >= 8


def test_the_median_error_is_within_the_goal() -> None:
    assert median_size(COMPARISONS) < GOAL


def test_the_median_over_frameworks_is_bounded_too() -> None:
    """One document with many runs must not carry the figure: frameworks count alike here, so the bound is wider."""
    medians = [median_size(group) for group in by_framework(COMPARISONS).values()]
    assert statistics.median(medians) < 0.25


def test_runs_with_nothing_assumed_are_within_the_goal_too() -> None:
    known = [each for each in COMPARISONS if not each.run.assumed]
    assert len(known) >= 12
    assert median_size(known) < 0.20


@pytest.mark.parametrize("framework", sorted(by_framework(COMPARISONS)))
def test_each_framework_s_median_stays_in_its_band(framework: str) -> None:
    errors = [each.error for each in by_framework(COMPARISONS)[framework]]
    low, high = BANDS[framework]
    assert low < statistics.median(errors) < high


def test_runs_in_float8_are_foreseen_about_as_well() -> None:
    """Their medians: 18% in size, 3% with sign. As products of bf16 they would be 28% and 25%."""
    assert len(IN_FLOAT8) >= 30
    assert median_size(IN_FLOAT8) < 0.20
    assert abs(statistics.median(each.error for each in IN_FLOAT8)) < 0.10
    assert max(each.error for each in IN_FLOAT8) < 1 / 3


def test_no_run_is_predicted_far_too_slow() -> None:
    """A prediction that a published run beats by a third is a wrong formula, whatever the framework."""
    assert max(each.error for each in COMPARISONS) < 1 / 3


# Meta's 405B ran 128 stages of 126 blocks: the first holds the embedding alone, the last the head. weft wants a block
# in every stage, so it offers at most 7 stages a rank there.
WITHOUT_BLOCKS = ("llama3-405b-8192-8k", "llama3-405b-16384-8k")


@pytest.mark.parametrize("each", COMPARISONS, ids=lambda each: each.run.id)
def test_published_layouts_are_legal(each: Comparison) -> None:
    """What was run in the world must be a plan that the rules allow."""
    reasons = check_plan(request_of_run(each.run), columns_of([plan_of_run(each.run)]))
    expected = ["every pipeline stage needs a block"] if each.run.id in WITHOUT_BLOCKS else []
    assert [sentence for sentence, _ in reasons] == expected


Case = tuple[str, str, int, int, str]  # model, devices, global batch, sequence length, precision


@cache
def best_s(*case: Any, layout: tuple[tuple[str, Any], ...] = ()) -> float:
    """Seconds of the best compiled plan that fits, of all or of those with this layout."""
    model, devices, batch, length, preset = case
    request = request_of(model, devices, global_batch=batch, sequence_length=length, preset=preset, attention="fused")
    freedom = Freedom(fixed={"compile.enabled": True, **dict(layout)})
    best = search(request, freedom=freedom, precision={"preset": preset}, top=1).plans[0]
    assert best.fits
    return best.step_s


def slower_by(case: Case, layout: dict[str, Any]) -> float:
    """How much the layout, its free choices made best, loses to the best plan of all."""
    return best_s(*case, layout=tuple(layout.items())) / best_s(*case) - 1


PUBLISHED: dict[str, tuple[Case, dict[str, Any]]] = {
    "Llama-3 8B, 8 H100: FSDP": (
        ("llama-3-8b", "8xH100-80GB", 64, 8192, "bf16"),
        {"mesh.dp_shard": 8, "data_parallel.zero": 3},
    ),
    "Megatron 175B, 384 A100: TP8 PP12": (
        ("gpt3-175b", "48x8xA100-80GB", 1536, 2048, "fp16"),
        {"mesh.tp": 8, "mesh.pp": 12, "mesh.cp": 1},
    ),
    "Megatron 530B, 2,520 A100: TP8 PP35": (
        ("megatron-530b", "315x8xA100-80GB", 2520, 2048, "fp16"),
        {"mesh.tp": 8, "mesh.pp": 35, "mesh.cp": 1},
    ),
    "DeepSeek-V3, 2,048 H800: PP16, ZeRO-1, experts free": (
        ("deepseek-v3", "256x8xH800", 15_360, 4096, "bf16"),
        {"mesh.tp": 1, "mesh.pp": 16, "mesh.cp": 1, "data_parallel.zero": 1},
    ),
    "GPT-2 1.5B, 8 V100-32GB: ZeRO data parallel": (
        ("gpt2-xl", "8xV100-32GB", 64, 1024, "fp16"),
        {"mesh.tp": 1, "mesh.pp": 1, "mesh.dp_shard": 8},
    ),
}

# Published layouts that the planner ranks lower, and why it is not expected to do otherwise.
WHOLE_SUMS = (
    "weft's selective recompute keeps a row product before it is scattered over the sequence, two whole streams a "
    "block, so these need full recompute where the published runs needed none; more context parallelism avoids it"
)
OVERRULED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "Llama-3.1 405B, 16,384 H100: TP8 PP16": (
        ("llama-3.1-405b", "2048x8xH100-80GB@roce-400", 2048, 8192, "bf16"),
        {"mesh.tp": 8, "mesh.pp": 16, "mesh.cp": 1},
        WHOLE_SUMS,
    ),
    "Llama-3.1 405B, 128K tokens: TP8 CP16 PP16": (
        ("llama-3.1-405b", "2048x8xH100-80GB@roce-400", 128, 131_072, "bf16"),
        {"mesh.tp": 8, "mesh.pp": 16, "mesh.cp": 16},
        WHOLE_SUMS,
    ),
    "DeepSeek-V3, 2,048 H800: EP64": (
        ("deepseek-v3", "256x8xH800", 15_360, 4096, "bf16"),
        {"mesh.tp": 1, "mesh.pp": 16, "mesh.cp": 1, "mesh.ep": 64, "data_parallel.zero": 1},
        "its router sends a token to at most 4 nodes and DualPipe hides the exchange behind arithmetic; the planner "
        "counts 8 copies a token to any of 8 nodes, in the open, and so keeps experts inside a node (EP8)",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_within_a_quarter_of_the_best(name: str) -> None:
    assert slower_by(*PUBLISHED[name]) < 0.25


@pytest.mark.parametrize("name", OVERRULED)
def test_an_overruled_layout_has_a_reason_and_still_needs_it(name: str) -> None:
    """When the model learns what it lacks, the line moves to the table above."""
    case, layout, reason = OVERRULED[name]
    assert reason
    assert 0.25 < slower_by(case, layout) < 1
