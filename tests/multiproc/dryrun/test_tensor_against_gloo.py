"""Tensor parallelism on real ranks, in the dry run and in the planner: the same bytes on the wire, to the byte.

By (axis, collective, phase), with the number of collectives on the tensor axis; memory of the dry run within a few
percent of these small models, weights and states of the planner but for the allocator's rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from metered_ranks import metered_in_rank
from samples import by_default

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

ROUNDING_BYTES = 512 * 4 * 100  # of a hundred tensors and their states

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 1021,
    "max_position_embeddings": 256,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 32, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 1021},
    "phi3": {**_SIZES, "num_key_value_heads": 1, "pad_token_id": 0},
    "gpt_neox": _SIZES,
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "cohere": {**_GROUPED, "use_qk_norm": True},
    "olmo2": {**_SIZES, "num_key_value_heads": 4},
    "qwen2_moe": {
        **_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 128,
    },
    "bloom": {"hidden_size": 128, "n_layer": 3, "n_head": 4, "vocab_size": 1021},
}  # fmt: skip


def plan_tables(
    *, tp: int = 2, dp: int = 1, zero: int = 0, stream: bool, cut_loss: bool = True, cuts: int = 1,
    recompute: str = "none", preset: str = "fp32", mode: str = "1d",
) -> dict[str, Any]:  # fmt: skip
    return {
        "mesh": {"tp": tp, "dp_shard" if zero else "dp_replicate": dp},
        "data_parallel": {"zero": zero},
        "tensor_parallel": {"mode": mode, "sequence_parallel": stream, "loss_parallel": cut_loss},
        "pipeline": {"microbatches": cuts},
        "activations": {"policy": recompute},
        "precision": {"preset": preset},
    }


# the second is uneven in everything: an odd vocabulary, one key-value head that both ranks hold, in a fused projection
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequence parallel, ZeRO-3": ("qwen3", plan_tables(dp=2, zero=3, stream=True, cuts=2, preset="bf16")),
    "repeated heads, whole logits": ("phi3", plan_tables(stream=False, cut_loss=False, recompute="full")),
}
CAMPAIGN: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name}, stream": (name, plan_tables(stream=True, recompute="full", preset="bf16"))
        for name in MODELS
        if name != "bloom"  # its attention adds the residual itself
    },
    **{f"{name}, no stream": (name, plan_tables(stream=False, cut_loss=False, cuts=2)) for name in MODELS},
    "DDP": ("llama", plan_tables(dp=2, stream=True, cuts=2)),
    "ZeRO-1": ("mixtral", plan_tables(dp=2, zero=1, stream=True, cuts=2, recompute="selective")),
    "ZeRO-2, four ranks": ("cohere", plan_tables(tp=4, zero=2, stream=True, recompute="selective", preset="bf16")),
    "ZeRO-3, shards of a fused projection": ("phi3", plan_tables(dp=2, zero=3, stream=True)),
    "four ranks, two heads": ("llama", plan_tables(tp=4, stream=False, cut_loss=False, recompute="full")),
    "2d": ("llama", plan_tables(tp=4, mode="2d", stream=False, cuts=2, recompute="full", preset="bf16")),
    "2d, whole logits": ("gpt2", plan_tables(tp=4, mode="2d", stream=False, cut_loss=False)),
    "2.5d": ("qwen3", plan_tables(tp=8, mode="2.5d", stream=False)),
    "3d": ("gpt_neox", plan_tables(tp=8, mode="3d", stream=False)),
    "ZeRO-3, olmo2": ("olmo2", plan_tables(dp=2, zero=3, stream=False, recompute="full")),
}


def run_tables(model_type: str) -> dict[str, Any]:
    model = {"type": model_type, "config": MODELS[model_type]}
    return {"model": model, "data": {"sequence_length": 64}, "train": {"global_batch": 4}}


def require_told(dry: DryRun, run: RunSpec, plan: Plan) -> None:
    told = estimate_plan(run, plan, f"{plan.num_ranks}xCPU")
    assert wire(told.traffic) == wire(dry.traffic)
    for term in ("weights", "optimizer_state"):
        assert told.memory_terms[term] == pytest.approx(dry.terms[term], abs=ROUNDING_BYTES), term


def wire(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Bytes and, on the tensor axis, collectives: the planner knows neither DDP's buckets nor the load of experts."""
    return {
        (row["axis"], row["collective"], row["phase"]): (row["bytes"], row["count"] if row["axis"] == "tp" else 0)
        for row in rows
        if row["phase"] != "buffer"
    }


def compare(model_type: str, tables: dict[str, Any]) -> None:
    run, plan = RunSpec.from_tables(run_tables(model_type)), Plan.from_tables(tables)
    real = run_ranks(metered_in_rank, plan.num_ranks, run_tables(model_type), tables, timeout_s=240)[0]
    dry = dry_run(run, plan, on_gpu=False)
    assert dry.traffic == real["traffic"]
    assert dry.flops == real["flops"]
    # a few megabytes: what real collectives hold on to until they are waited for is a share of them
    assert dry.peak_bytes == pytest.approx(real["peak_bytes"], rel=0.05)
    require_told(dry, run, plan)


@pytest.mark.parametrize("name", by_default([], CASES, extended=["sequence parallel, ZeRO-3"]))
def test_ranks_send_what_the_dry_run_and_the_planner_say(name: str) -> None:
    compare(*CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGN)
def test_ranks_of_every_kind_of_model_send_what_the_planner_says(name: str) -> None:
    compare(*CAMPAIGN[name])
