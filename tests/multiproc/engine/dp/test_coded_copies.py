"""Codes beside tensor parallelism and tied tables: copies of a parameter keep equal bits, unless blocks span two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import coded_mutations as bugs
from gloo_ranks import run_ranks
from tiny import build_engine, global_batch

from weft.core.errors import WeftError
from weft.core.run_spec import ModelSpec
from weft.verify.forward_weights import WeightWatch, check_forward_weights

IN_INT8 = {"preset": "bf16", "reduce": "int8", "gather": "int8"}
TENSOR = {
    "mesh": {"dp_shard": 2, "tp": 2}, "data_parallel": {"zero": 3}, "tensor_parallel": {"sequence_parallel": False},
    "precision": {"preset": "fp32", "reduce": "int8"},  # bfloat16 would hide that masters of a norm differ
}  # fmt: skip
TIED = {
    "mesh": {"dp_shard": 2, "pp": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2},
    "precision": IN_INT8,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {"tp": ("llama", TENSOR), "tied": ("qwen3-tied", TIED)}


def watched(_rank: int, _world: int) -> dict[str, list[tuple[bool, str]]]:
    found: dict[str, list[tuple[bool, str]]] = {}
    for name, (family, plan) in CASES.items():
        for bug in (nullcontext, bugs.parameters_forgotten):
            with bug(), build_engine(family, plan) as engine:
                watch = WeightWatch(engine)
                for step in range(3):
                    with watch.watching():
                        engine.step(engine.share_of(global_batch(step, rows=4)))
                check = check_forward_weights(watch.gather(), never_flushes=False, describe_rank=lambda rank: f"{rank}")
                found.setdefault(name, []).append((check.ok, check.detail))
    return found


def test_copies_get_equal_codes() -> None:
    for name, (healthy, broken) in run_ranks(watched, 4, timeout_s=300.0)[0].items():
        assert healthy[0], (name, healthy)
        assert not broken[0], f"{name}: blocks that span parameters were not found"


PHI3 = ModelSpec(
    type="phi3",
    config={
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "pad_token_id": 0,
    },
)  # fmt: skip
FUSED = {"mesh": {"dp_shard": 1, "tp": 4}, "data_parallel": {"zero": 3}, "precision": IN_INT8}


def refused(_rank: int, _world: int) -> str:
    try:
        build_engine(PHI3, FUSED)
    except WeftError as error:
        return f"{error.message} hint: {error.hint}"
    return "built"


def test_repeated_heads_of_a_fused_matrix_are_refused() -> None:
    (message, *_) = run_ranks(refused, 4, timeout_s=200.0)
    assert "that several tensor-parallel ranks repeat beside heads of one rank: gathered in int8" in message
    assert "lower mesh.tp" in message
