"""Quiet when right: healthy runs of many kinds pass every check. Slow campaigns: twice fifty, and twenty cut ones."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from verify_ranks import MODELS, Tables, small_run, verdicts_in_rank, verdicts_of_many_in_rank

SHARDED, REPLICATED = {"dp_shard": 2}, {"dp_replicate": 2}


def plan(stage: int, *, microbatches: int = 1, preset: str = "fp32", mesh: dict[str, int] | None = None) -> Tables:
    return {
        "mesh": mesh or (SHARDED if stage else REPLICATED),
        "data_parallel": {"zero": stage},
        "pipeline": {"microbatches": microbatches},
        "precision": {"preset": preset},
    }


# model, plan, train settings, data settings
HEALTHY: dict[str, tuple[str, Tables, Tables, Tables]] = {
    "plain": ("olmo2", plan(3, microbatches=2), {"schedule": "linear"}, {}),
    "bf16, tied, no clipping": ("qwen3-tied", plan(2, microbatches=2, preset="bf16"), {"clip_norm": 0.0}, {}),
    "fp16, sgd": ("llama", plan(0, microbatches=2, preset="fp16"), {"optimizer": "sgd", "learning_rate": 0.1}, {}),
    "8-bit moments": ("llama-wide", plan(3), {"optimizer": "adamw8bit"}, {}),
    "adam, frozen, experts": ("mixtral", plan(1), {"optimizer": "adam", "frozen": ["*.norm.weight", "lm_head.*"]}, {}),
    "bf16, cut, recomputed": (
        "gemma2",
        {**plan(0, microbatches=2, preset="bf16", mesh={"tp": 2}), "activations": {"policy": "selective"}},
        {},
        {},
    ),
    "documents apart, dropout": ("gpt2", plan(0, microbatches=4), {}, {"isolate_documents": True}),
}


HEALTHY |= {
    "moments on the host, updated on the device": (
        "qwen3-tied",
        {**plan(3, microbatches=2), "offload": {"optimizer": "cpu", "update": "device"}},
        {},
        {},
    ),
    "moments on the host, updated there": (
        "llama",
        {**plan(0, microbatches=2), "offload": {"optimizer": "cpu", "update": "host"}},
        {"optimizer": "sgd", "learning_rate": 0.1},
        {},
    ),
    "bf16, masters on the host": (
        "qwen3-tied",
        {
            **plan(0, microbatches=2, preset="bf16"),
            "offload": {"optimizer": "cpu", "update": "device", "masters": "host"},
        },
        {},
        {},
    ),
    "bf16, weights on the host, cut": (
        "gemma2",
        {
            **plan(0, microbatches=2, preset="bf16", mesh={"tp": 2}),
            "offload": {"optimizer": "cpu", "update": "host", "parameters": "cpu"},
        },
        {},
        {},
    ),
}


def divided(dispatcher: str, *, wire: str, chunks: int) -> Tables:
    exchange = {"dispatcher": dispatcher, "wire": wire, "chunks": chunks}
    return {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}, "expert_parallel": exchange}


# tokens that travel in float8, in parts, beside shared experts; the plan's own tables come last
HEALTHY |= {
    "float8 wire, parts": ("mixtral", divided("tokens", wire="float8", chunks=2), {}, {}),
    "float8 wire, bf16": (
        "mixtral",
        {**divided("pairs", wire="float8", chunks=1), "precision": {"preset": "bf16"}},
        {},
        {},
    ),
    "parts, shared experts, recomputed": (
        "deepseek_v3",
        {**divided("gather", wire="activations", chunks=3), "activations": {"policy": "full"}},
        {},
        {},
    ),
}


def wrong(verdicts: list[Tables]) -> list[str]:
    return [
        f"{verdict['plan']}: {check['name']}: {check['detail']}"
        for verdict in verdicts
        for check in verdict["checks"]
        if not check["ok"]
    ]


@pytest.mark.parametrize("case", by_default([], HEALTHY, extended=["bf16, cut, recomputed"]))
def test_a_healthy_run_raises_no_alarm(case: str, corpus: Path, tmp_path: Path) -> None:
    model, tables, train, data = HEALTHY[case]
    run = small_run(str(corpus), model=model, train=train, data=data)
    verdicts = run_ranks(verdicts_in_rank, 2, run, [tables], str(tmp_path), timeout_s=300)[0]
    assert not wrong(verdicts)
    names = [check["name"] for check in verdicts[0]["checks"]]
    assert len(names) == len(set(names)) >= 17
    assert ("same precision" in names) == (
        case
        in (
            *("bf16, tied, no clipping", "fp16, sgd", "8-bit moments", "bf16, cut, recomputed"),
            *("float8 wire, parts", "float8 wire, bf16"),
            *("bf16, masters on the host", "bf16, weights on the host, cut"),
        )
    )


LIMITED, BIASED = {"capacity_factor": 0.75}, {"capacity_factor": 1.0, "bias_rate": 1e-3, "balance_loss": 0.05}
DIVIDED = {"dp_shard": 2, "ep": 2}
# model, [router], plan
ROUTED: dict[str, tuple[str, Tables, Tables]] = {
    "capacity, ZeRO-3": ("mixtral", LIMITED, plan(3, microbatches=2)),
    "capacity, DDP": ("mixtral", LIMITED, plan(0, microbatches=4)),
    "capacity, bf16": ("mixtral", LIMITED, plan(2, microbatches=2, preset="bf16")),
    "bias, bf16, experts divided": ("deepseek_v3", BIASED, plan(3, preset="bf16", mesh=DIVIDED)),
    "bias, stages, recomputed": (
        "deepseek_v3",
        BIASED,
        {**plan(0, microbatches=4, mesh={"pp": 2}), "activations": {"policy": "full"}},
    ),
}


@pytest.mark.parametrize("case", by_default([], ROUTED, extended=["capacity, ZeRO-3"]))
def test_a_healthy_router_raises_no_alarm(case: str, corpus: Path, tmp_path: Path) -> None:
    model, router, tables = ROUTED[case]
    run = small_run(str(corpus), model=model, router=router)
    verdicts = run_ranks(verdicts_in_rank, 2, run, [tables], str(tmp_path), timeout_s=600)[0]
    assert not wrong(verdicts)
    details = {check["name"]: check["detail"] for check in verdicts[0]["checks"]}
    print("expert load", details["expert load"], details["dropped choices"], details.get("router bias"))
    assert "dropped choices" in details
    assert not details["dropped choices"].startswith("0 ")
    assert ("router bias" in details) == ("bias_rate" in router)


def random_case(number: int, corpus: str) -> tuple[Tables, Tables]:
    """A run and a plan drawn from everything that is supported on two ranks."""
    draw = random.Random(number)
    model = draw.choice(sorted(MODELS))
    preset = draw.choice(["fp32", "fp32", "bf16", "fp16"])
    stage = draw.choice([0, 1, 2, 3])
    train: dict[str, Any] = {
        "seed": number,
        "optimizer": draw.choice(["adamw", "adamw", "adam", "sgd", "adamw8bit"]),
        "learning_rate": draw.choice([1e-4, 1e-3, 1e-2]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "clip_norm": draw.choice([0.0, 1.0]),
        "schedule": draw.choice(["cosine", "linear", "constant"]),
        "warmup_steps": draw.choice([0, 2, 10]),
    }
    data = {"sequence_length": draw.choice([8, 16, 24])}
    return small_run(corpus, model=model, train=train, data=data), plan(
        stage, microbatches=draw.choice([1, 2, 4]), preset=preset
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4000, 4050))
def test_fifty_runs_raise_no_alarm(number: int, corpus: Path, tmp_path: Path) -> None:
    run, tables = random_case(number, str(corpus))
    verdicts = run_ranks(verdicts_in_rank, 2, run, [tables], str(tmp_path), timeout_s=600)[0]
    margins = {check["name"]: check["margin"] for check in verdicts[0]["checks"] if check["margin"]}
    print(f"margins {max(margins.values()):.3f} {max(margins, key=lambda name: margins[name])} {verdicts[0]['plan']}")
    assert not wrong(verdicts)


def cut_case(number: int, corpus: str) -> tuple[Tables, Tables, int]:
    """A run, a plan with tensor parallelism and its number of ranks."""
    draw = random.Random(number)
    run, _ = random_case(number, corpus)
    run = small_run(corpus, model=draw.choice(["llama", "llama-odd", "gpt2", "qwen3-tied", "phi3", "mixtral", "olmo2"]),
                    train={**run["train"], "optimizer": draw.choice(["adamw", "sgd"])})  # fmt: skip
    both = {"tp": 2, "dp_shard": 2}
    meshes: list[tuple[dict[str, int], int]] = [({"tp": 2}, 0), ({"tp": 4}, 0), ({"tp": 2, "dp_replicate": 2}, 0)]
    mesh, stage = draw.choice([*meshes, meshes[0], (both, 1), (both, 2), (both, 3)])
    switches = {name: draw.random() < 0.5 for name in ("sequence_parallel", "loss_parallel")}
    tables = {
        **plan(stage, microbatches=draw.choice([1, 2]), preset=draw.choice(["fp32", "bf16", "fp16"]), mesh=mesh),
        "tensor_parallel": switches,
        "activations": {"policy": draw.choice(["none", "none", "full", "selective"])},
    }
    return run, tables, math.prod(mesh.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6000, 6020))
def test_twenty_cut_runs_raise_no_alarm(number: int, corpus: Path, tmp_path: Path) -> None:
    run, tables, num_ranks = cut_case(number, str(corpus))
    verdicts = run_ranks(verdicts_in_rank, num_ranks, run, [tables], str(tmp_path), timeout_s=900)[0]
    margins = {check["name"]: check["margin"] for check in verdicts[0]["checks"] if check["margin"]}
    print(f"margins {max(margins.values()):.3f} {max(margins, key=lambda name: margins[name])} {verdicts[0]['plan']}")
    assert not wrong(verdicts)


LAYOUTS: dict[str, Tables] = {
    "single": {},
    "ZeRO-2": {"mesh": SHARDED, "data_parallel": {"zero": 2}},
    "ZeRO-3": {"mesh": SHARDED, "data_parallel": {"zero": 3}},
    "tp 2": {"mesh": {"tp": 2}},
    "pp 2": {"mesh": {"pp": 2}},
}
SEEDS_EACH = 10  # fifty over all layouts


def mixed_cases(layout: str, corpus: str) -> dict[str, tuple[Tables, Tables]]:
    """Runs of four families in two precisions, with the loss whole and fused."""
    cases = {}
    for number in range(8000 + list(LAYOUTS).index(layout), 8000 + SEEDS_EACH * len(LAYOUTS), len(LAYOUTS)):
        draw = random.Random(number)
        model, preset = draw.choice(["llama", "qwen3-tied", "gpt2", "gemma2"]), draw.choice(["fp32", "bf16"])
        microbatches = draw.choice([2, 4]) if layout == "pp 2" else draw.choice([1, 2])
        loss = "fused" if draw.random() < 0.4 else "whole"
        isolate = draw.random() < 0.25 and model != "gemma2"  # which is not known to keep documents apart
        run = small_run(
            corpus,
            model=model,
            train={"seed": number, "learning_rate": draw.choice([1e-3, 1e-2])},
            data={"sequence_length": draw.choice([8, 16]), "isolate_documents": isolate},
        )
        tables = {
            **LAYOUTS[layout],
            "pipeline": {"microbatches": microbatches},
            "precision": {"preset": preset},
            "kernels": {"loss": loss},
        }
        cases[f"{number} {model} {layout} {preset} {loss}"] = (run, tables)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_mixed_seeds_raise_no_alarm(layout: str, corpus: Path, tmp_path: Path) -> None:
    cases, num_ranks = mixed_cases(layout, str(corpus)), 1 if layout == "single" else 2
    verdicts = run_ranks(verdicts_of_many_in_rank, num_ranks, cases, str(tmp_path), timeout_s=3600)[0]
    assert len(verdicts) == SEEDS_EACH
    assert not {name: wrong([verdict]) for name, verdict in verdicts.items() if not verdict["ok"]}
