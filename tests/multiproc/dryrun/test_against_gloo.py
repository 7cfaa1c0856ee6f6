"""The dry run against real ranks: the same bytes in memory and on the wire, and the planner's on the wire."""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from metered_ranks import metered_in_rank
from samples import by_default

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

LLAMA: dict[str, Any] = {
    "type": "llama",
    "config": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 1021,
    },
}  # fmt: skip
GPT2: dict[str, Any] = {
    "type": "gpt2",
    "config": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 1021},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DDP": (LLAMA, {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}}, {}),
    "DDP, by a star": (LLAMA, {"mesh": {"dp_replicate": 3}, "data_parallel": {"all_reduce": "star"}}, {}),
    "ZeRO-1": (LLAMA, {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}}, {}),
    "ZeRO-2, bf16": (
        LLAMA,
        {
            "mesh": {"dp_shard": 3},
            "data_parallel": {"zero": 2},
            "pipeline": {"microbatches": 2},
            "precision": {"preset": "bf16"},
        },
        {},
    ),
    # GPT-2 stores its matrices [in, out], and three ranks cut 128 rows unevenly
    "ZeRO-3, full recompute": (
        GPT2,
        {"mesh": {"dp_shard": 3}, "data_parallel": {"zero": 3}, "activations": {"policy": "full"}},
        {"optimizer": "sgd"},
    ),
    "HSDP, selective recompute": (
        LLAMA,
        {
            "mesh": {"dp_replicate": 2, "dp_shard": 2},
            "data_parallel": {"zero": 3},
            "activations": {"policy": "selective"},
        },
        {},
    ),
}


@pytest.mark.parametrize("name", by_default([], CASES, extended=["ZeRO-2, bf16"]))
def test_real_ranks_need_and_send_what_the_dry_run_says(name: str) -> None:
    model, tables, train = CASES[name]
    settings = {"model": model, "data": {"sequence_length": 128}, "train": {"global_batch": 12, **train}}
    run, plan = RunSpec.from_tables(settings), Plan.from_tables(tables)
    real = run_ranks(metered_in_rank, plan.num_ranks, settings, tables, timeout_s=240)[0]
    dry = dry_run(run, plan, on_gpu=False)
    assert real["is_complete"]
    assert dry.peak_bytes == pytest.approx(real["peak_bytes"], rel=0.01)
    assert dry.peak.as_dict()["peak_at"] == real["peak_at"]
    assert dry.terms == pytest.approx(real["terms"], rel=0.01, abs=0.002 * dry.peak_bytes)
    assert dry.flops == real["flops"]
    assert dry.traffic == real["traffic"]
    predicted = estimate_plan(run, plan, f"{plan.num_ranks}xCPU").traffic
    assert wire(predicted) == wire(dry.traffic)


def wire(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("axis", "collective", "phase", "bytes")
    return sorted(tuple(row[key] for key in keys) for row in rows)
