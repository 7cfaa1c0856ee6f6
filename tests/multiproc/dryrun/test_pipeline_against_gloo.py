"""Pipelines on real ranks and in the dry run: on every rank the same bytes on the wire, the same operations.

Messages are counted where they are sent, by the phase whose result they carry; headers that tell a shape are not.
"""

from __future__ import annotations

from typing import Any

import pytest
from gloo_ranks import run_ranks
from metered_ranks import metered_in_rank

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.run import dry_run

CONFIG: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1021, "head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
RUN = {"model": {"type": "qwen3", "config": CONFIG}, "data": {"sequence_length": 64}, "train": {"global_batch": 8}}


def plan_tables(
    schedule: str, *, stages: int = 1, pp: int = 2, tp: int = 1, dp: int = 1, zero: int = 0, preset: str = "fp32"
) -> dict[str, Any]:
    return {
        "mesh": {"pp": pp, "tp": tp, "dp_shard" if zero else "dp_replicate": dp},
        "data_parallel": {"zero": zero},
        "tensor_parallel": {"sequence_parallel": tp > 1},
        "pipeline": {"schedule": schedule, "virtual_stages": stages, "microbatches": 4},
        "precision": {"preset": preset},
    }


CASES = {"1f1b, tied": plan_tables("1f1b", preset="bf16")}
CAMPAIGN = {
    "gpipe": plan_tables("gpipe"),
    "interleaved": plan_tables("interleaved_1f1b", stages=2),
    "zero bubble": plan_tables("zero_bubble"),
    "a V": plan_tables("zbv", stages=2),
    "four ranks": plan_tables("1f1b", pp=4),
    "replicas": plan_tables("1f1b", dp=2),
    "ZeRO-1": plan_tables("1f1b", dp=2, zero=1),
    "ZeRO-3": plan_tables("zero_bubble", dp=2, zero=3, preset="bf16"),
    "a slice of the sequence": plan_tables("1f1b", tp=2),
}


def compare(tables: dict[str, Any]) -> None:
    plan = Plan.from_tables(tables)
    real = run_ranks(metered_in_rank, plan.num_ranks, RUN, tables, timeout_s=240)
    for rank in (0, plan.num_ranks - 1):
        dry = dry_run(RunSpec.from_tables(RUN), plan, rank=rank, on_gpu=False)
        assert dry.traffic == real[rank]["traffic"]
        assert dry.flops == real[rank]["flops"]
        # a few megabytes: messages that have not left yet are a share of them
        assert dry.peak_bytes == pytest.approx(real[rank]["peak_bytes"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_pipeline_send_what_the_dry_run_says(name: str) -> None:
    compare(CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGN)
def test_ranks_of_every_pipeline_send_what_the_dry_run_says(name: str) -> None:
    compare(CAMPAIGN[name])
