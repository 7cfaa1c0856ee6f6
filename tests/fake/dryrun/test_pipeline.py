"""Ranks of pipelines on fake tensors, and the formulas of `weft plan` beside them: first, middle and last rank.

Memory within a few per cent; every byte on the wire the same.
"""

from __future__ import annotations

from typing import Any

import pytest
from samples import by_default

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan, resolve_model
from weft.plan.estimate import Estimate
from weft.plan.pp.stages import Place, rank_at

CLOSE = 0.04  # of the peak
BF16 = {"precision": {"preset": "bf16"}}
FUSED = {"kernels": {"loss": "fused"}}
_SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 4096,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", "config": _SIZES},
    "tied": {"type": "qwen3", "config": {**_SIZES, "head_dim": 32, "tie_word_embeddings": True}},
    "gpt2": {
        "type": "gpt2",
        # attention that drops out writes its scores on a CPU
        "config": {
            "n_embd": 256,
            "n_layer": 8,
            "n_head": 8,
            "n_positions": 512,
            "vocab_size": 4096,
            "attn_pdrop": 0.0,
        },
    },
}


def run_of(model: str) -> RunSpec:
    return RunSpec.from_tables(
        {"model": MODELS[model], "data": {"sequence_length": 256}, "train": {"global_batch": 32}}
    )


def plan_of(
    schedule: str, *, pp: int = 2, stages: int = 1, cuts: int = 8, dp: int = 1, zero: int = 0, tp: int = 1,
    stream: bool = True, recompute: str = "none", mixture: tuple[int, ...] = (), blocks: tuple[int, ...] = (),
    **tables: Any,
) -> Plan:  # fmt: skip
    return Plan.from_tables(
        {
            "mesh": {"pp": pp, "tp": tp, "dp_shard" if zero else "dp_replicate": dp},
            "data_parallel": {"zero": zero},
            "tensor_parallel": {"sequence_parallel": stream},
            "pipeline": {"schedule": schedule, "virtual_stages": stages, "microbatches": cuts, "blocks": blocks},
            "activations": {"policy": recompute, "mixture": mixture},
            **tables,
        }
    )


CASES: dict[str, tuple[str, Plan, Place]] = {
    "1f1b, tied, last": ("tied", plan_of("1f1b", **BF16), "last"),
    "zbv, by hand, first": ("llama", plan_of("zbv", stages=2, cuts=4, blocks=(4, 2, 1, 1), **BF16), "first"),
    "zero bubble, ZeRO-1, first": ("llama", plan_of("zero_bubble", dp=2, zero=1, cuts=4), "first"),
    # gradients of the head wait with every micro-batch, and no logits do
    "GPipe, fused loss, last": ("llama", plan_of("gpipe", pp=4, **BF16, **FUSED), "last"),
    # several stages a rank: the root is kept and reduced once; nothing is gathered ahead for another stage
    "looped BFS, ZeRO-1, first": ("llama", plan_of("looped_bfs", stages=2, dp=2, zero=1, cuts=4), "first"),
    "interleaved, GPT-2, ZeRO-3, first": (
        "gpt2",
        plan_of("interleaved_1f1b", stages=2, dp=2, zero=3, cuts=4, **BF16),
        "first",
    ),
}
_SCHEDULES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "looped_bfs": 2, "zero_bubble": 1, "zbv": 2,
    "dualpipev": 2,
}  # fmt: skip
_PLACES: tuple[Place, ...] = ("first", "middle", "last")
CAMPAIGN: dict[str, tuple[str, Plan, Place]] = {
    **{
        f"{schedule}, pp 4, {place}": ("llama", plan_of(schedule, pp=4, stages=stages, cuts=cuts, **BF16), place)
        for schedule, stages, cuts in (
            (name, stages, 1 if name == "naive" else 8) for name, stages in _SCHEDULES.items()
        )
        for place in _PLACES
    },
    **{
        f"{schedule}, ZeRO-{zero}, {place}": ("llama", plan_of(schedule, stages=stages, dp=2, zero=zero, **BF16), place)
        for schedule, stages in (("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1))
        for zero in (0, 1, 2, 3)
        for place in ("first", "last")
    },
    **{
        f"{schedule}, tp 2, {place}": ("tied", plan_of(schedule, stages=stages, tp=2, stream=stream), place)
        for schedule, stages, stream in (("1f1b", 1, True), ("1f1b", 1, False), ("zbv", 2, True))
        for place in ("first", "last")
    },
    **{
        f"{schedule}, {blocks}, {place}": ("llama", plan_of(schedule, stages=2, blocks=blocks, **BF16), place)
        for schedule in ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipev")
        for blocks in ((4, 2, 1, 1), (1, 1, 2, 4))
        for place in ("first", "last")
    },
    **{
        f"1f1b, (1, 1, 5, 1), {place}": ("tied", plan_of("1f1b", pp=4, blocks=(1, 1, 5, 1), **BF16), place)
        for place in _PLACES
    },
    **{
        f"{schedule}, tied, ZeRO-{zero}, first": ("tied", plan_of(schedule, stages=2, dp=2, zero=zero, cuts=4), "first")
        for schedule in ("zbv", "interleaved_1f1b", "looped_bfs")
        for zero in (1, 2, 3)
    },
    **{
        f"{schedule}, fused loss, ZeRO-{zero}, {place}": (
            "llama",
            plan_of(schedule, stages=stages, dp=2, zero=zero, cuts=4, **BF16, **FUSED),
            place,
        )
        for schedule, stages, zero in (("1f1b", 1, 0), ("zero_bubble", 1, 1), ("zbv", 2, 1), ("interleaved_1f1b", 2, 3))
        for place in ("first", "last")
    },
    **{
        f"1f1b, tp 2, fused loss, {'SP' if stream else 'no SP'}": (
            "tied",
            plan_of("1f1b", tp=2, stream=stream, **FUSED),
            "last",
        )
        for stream in (True, False)
    },
    "1f1b, tied, fused loss, last": ("tied", plan_of("1f1b", **FUSED), "last"),
    "GPT-2, last": ("gpt2", plan_of("1f1b", **BF16), "last"),
    "recompute, first": ("llama", plan_of("gpipe", recompute="full", **BF16), "first"),
    **{
        f"{schedule}, budget {mixture}, ZeRO-{zero}, {place}": (
            "llama",
            plan_of(schedule, stages=stages, dp=2, zero=zero, recompute="budget", mixture=mixture, **BF16),
            place,
        )
        for schedule, stages, zero in (("gpipe", 1, 0), ("1f1b", 1, 3), ("interleaved_1f1b", 2, 1))
        for mixture in ((3, 0), (2, 4))
        for place in ("first", "last")
    },
    "1f1b, tp 2, budget, first": (
        "llama",
        plan_of("1f1b", tp=2, cuts=4, recompute="budget", mixture=(2, 3), **BF16),
        "first",
    ),
    "tied, ZeRO-3, last": ("tied", plan_of("1f1b", dp=2, zero=3), "last"),
}


def both(model: str, plan: Plan, place: Place) -> tuple[DryRun, Estimate]:
    shape, _ = resolve_model(run_of(model))
    found = dry_run(run_of(model), plan, rank=rank_at(shape, plan, place), on_gpu=False)
    return found, estimate_plan(run_of(model), plan, f"{plan.num_ranks}xCPU", place=place)


def wire(rows: list[dict[str, Any]]) -> dict[tuple[str, ...], int]:
    return {(row["axis"], row["collective"], row["phase"]): row["bytes"] for row in rows if row["bytes"]}


def compare(model: str, plan: Plan, place: Place) -> None:
    found, predicted = both(model, plan, place)
    assert predicted.memory_bytes == pytest.approx(found.peak_bytes, rel=CLOSE)
    # norms, whose gradients come in the first half of a backward, may be reduced with the next micro-batch's
    rel = 1e-6 if plan.data_parallel.zero < 2 else 1e-4
    assert wire(predicted.traffic) == pytest.approx(wire(found.traffic), rel=rel)
    sent, told = (
        {row["phase"]: row["bytes"] for row in rows if row["collective"] == "send"}
        for rows in (found.traffic, predicted.traffic)
    )
    assert sent == told
    assert found.peak_bytes == sum(found.terms.values())


@pytest.mark.parametrize(
    "name", by_default(["zbv, by hand, first"], CASES, extended=["interleaved, GPT-2, ZeRO-3, first"])
)
def test_the_planner_agrees_on_a_rank_of_a_pipeline(name: str) -> None:
    compare(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGN)
def test_the_planner_agrees_on_every_kind_of_pipeline(name: str) -> None:
    compare(*CAMPAIGN[name])
