"""Context parallelism beside formats and memory tiers: `weft verify` holds each against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from samples import by_default
from verify_ranks import small_run, verdicts_in_rank

CP: dict[str, Any] = {"mesh": {"cp": 2}}
BF16 = {"preset": "bf16"}
ATTENTIONS = {name: {"context_parallel": {"attention": name}} for name in ("gather", "ring", "ulysses")}
OF_TWO: dict[str, dict[str, Any]] = {
    "fp16": {**CP, "precision": {"preset": "fp16"}},
    "float8": {
        **CP, **ATTENTIONS["ring"], "data_parallel": {"zero": 3}, "precision": BF16, "float8": {"linears": "all"},
    },
    "codes": {
        **CP, "data_parallel": {"zero": 3, "error_feedback": True},
        "precision": {**BF16, "reduce": "int8", "gather": "int8"},
    },
    "residual": {
        **CP, **ATTENTIONS["ring"], "data_parallel": {"zero": 1}, "precision": {**BF16, "residual": "float32"},
    },
    "states": {**CP, "data_parallel": {"zero": 3}, "offload": {"optimizer": "cpu"}},
    "weights": {
        **CP, **ATTENTIONS["ulysses"], "data_parallel": {"zero": 3}, "precision": BF16,
        "offload": {"optimizer": "cpu", "parameters": "cpu"},
    },
    "delayed": {
        **CP, "data_parallel": {"zero": 2}, "precision": BF16, "offload": {"optimizer": "cpu", "delayed": True},
    },
    "chunks": {
        **CP, "data_parallel": {"zero": 3}, "activations": {"policy": "full", "sequence_chunk": 3},
    },
    "inputs": {
        **CP, **ATTENTIONS["ring"], "data_parallel": {"zero": 2}, "precision": BF16,
        "activations": {"policy": "full", "offload": "cpu"},
    },
}  # fmt: skip
PAIRS = {"context_parallel": {"attention": "ring", "ulysses": 2}}
OF_FOUR: dict[str, dict[str, Any]] = {
    "pairs": {"mesh": {"cp": 4}, **PAIRS, "data_parallel": {"zero": 3}},
    "pairs, gather": {"mesh": {"cp": 4}, "context_parallel": {"attention": "gather", "ulysses": 2}},
    "codes": {
        "mesh": {"cp": 2, "dp_shard": 2}, "data_parallel": {"zero": 3},
        "precision": {**BF16, "reduce": "int8", "gather": "int8"},
    },
    "parts of inputs": {
        "mesh": {"cp": 2, "tp": 2}, **ATTENTIONS["ring"], "tensor_parallel": {"sequence_parallel": False},
        "activations": {"policy": "full", "partition": True},
    },
    "states, HSDP": {
        "mesh": {"cp": 2, "dp_replicate": 2}, "data_parallel": {"zero": 3}, "offload": {"optimizer": "cpu"},
        "pipeline": {"microbatches": 2},
    },
    "states, pp": {
        "mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}, "offload": {"optimizer": "cpu"},
        "data_parallel": {"zero": 1},
    },
    "pairs, bf16": {
        "mesh": {"cp": 4}, **PAIRS, "precision": BF16, "data_parallel": {"zero": 1},
        "activations": {"policy": "selective"}, "pipeline": {"microbatches": 2},
    },
    "fp16, pp": {"mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}, "precision": {"preset": "fp16"}},
}  # fmt: skip
FULL: dict[str, Any] = {"activations": {"policy": "full"}}
CONTIGUOUS_ULYSSES = {"context_parallel": {"attention": "ulysses", "split": "contiguous"}}
OF_TP: dict[str, Any] = {"mesh": {"cp": 2, "tp": 2}}
OF_PP: dict[str, Any] = {"mesh": {"cp": 2, "pp": 2}, "pipeline": {"microbatches": 4}}
# by name: model, ranks, plan. Rows of 15 tokens do not divide over ranks.
DROPPED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt2": ("gpt2", 2, {**CP, "data_parallel": {"zero": 3}}),
    "gpt2, eager": ("gpt2-eager", 2, {**CP, "data_parallel": {"zero": 3}}),
    "gpt2, ulysses": ("gpt2", 2, {**CP, **CONTIGUOUS_ULYSSES, **FULL}),
    "opt, recomputed": ("opt", 2, {**CP, **FULL, "data_parallel": {"zero": 3}}),
    "llama": ("llama-dropped", 2, CP),
    "gpt2, ring": ("gpt2-stream", 2, {**CP, **ATTENTIONS["ring"], "data_parallel": {"zero": 3}}),
    "gpt2, cp 4": ("gpt2", 4, {"mesh": {"cp": 4}, "context_parallel": {"split": "contiguous"}}),
    "opt, tp": ("opt", 4, OF_TP),
    "gpt2, tp, ulysses": ("gpt2", 4, {**OF_TP, **ATTENTIONS["ulysses"], **FULL}),
    "llama, pp": ("llama-dropped", 4, {**OF_PP, "data_parallel": {"zero": 1}}),
    "gpt2, pp, ulysses": ("gpt2", 4, {**OF_PP, **ATTENTIONS["ulysses"], **FULL}),
}


def require_verified(plan: dict[str, Any], ranks: int, corpus: Path, folder: Path, **of_run: Any) -> None:
    run = small_run(str(corpus), **of_run)
    (verdict,) = run_ranks(verdicts_in_rank, ranks, run, [plan], str(folder), timeout_s=600)[0]
    assert [f"{one['name']}: {one['detail']}" for one in verdict["checks"] if not one["ok"]] == []


@pytest.mark.parametrize("name", by_default([], OF_TWO, extended=["fp16", "float8", "codes", "chunks", "inputs"]))
def test_positions_are_divided_beside_a_format_or_a_tier(name: str, corpus: Path, tmp_path: Path) -> None:
    require_verified(OF_TWO[name], 2, corpus, tmp_path)


@pytest.mark.slow
def test_positions_are_divided_beside_states_in_files(corpus: Path, tmp_path: Path) -> None:
    offload = {"optimizer": "nvme", "folder": str(tmp_path / "states")}
    require_verified({**CP, "data_parallel": {"zero": 3}, "offload": offload}, 2, corpus, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_FOUR)
def test_positions_are_divided_beside_another_axis_too(name: str, corpus: Path, tmp_path: Path) -> None:
    require_verified(OF_FOUR[name], 4, corpus, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPED)
def test_positions_are_divided_beside_dropout(name: str, corpus: Path, tmp_path: Path) -> None:
    model, ranks, plan = DROPPED[name]
    require_verified(plan, ranks, corpus, tmp_path, model=model, data={"sequence_length": 15})
