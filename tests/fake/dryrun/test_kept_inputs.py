"""Dry runs of offloaded and partitioned inputs: less device memory by the inputs' size, gathers in the traffic."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

BLOCKS, ROWS, LENGTH, WIDTH = 8, 16, 2048, 256  # the peak is in a block's backward
CONFIG = {
    "hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": BLOCKS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257,
}  # fmt: skip
RUN = RunSpec.from_tables(
    {
        "model": {"type": "llama", "config": CONFIG},
        "data": {"sequence_length": LENGTH},
        "train": {"global_batch": ROWS},
    }
)
WIDE = RunSpec.from_tables(
    {
        "model": {
            "type": "llama",
            "config": {
                **CONFIG,
                "hidden_size": 512,
                "intermediate_size": 2048,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "vocab_size": 1000,
            },
        },
        "data": {"sequence_length": 1024},
        "train": {"global_batch": 8},
    }
)
INPUT_BYTES = ROWS * LENGTH * WIDTH * 2  # bfloat16


def dried(kept: dict[str, Any], *, on_gpu: bool = True, **tables: Any) -> DryRun:
    activations = {"policy": "full", **kept}
    plan = {"precision": {"preset": "bf16"}, "data_parallel": {"zero": 2}, **tables, "activations": activations}
    return dry_run(RUN, Plan.from_tables(plan), on_gpu=on_gpu)


@pytest.mark.parametrize(
    "tables",
    [{}, pytest.param({"compile": {"enabled": True}, "kernels": {"loss": "fused"}}, marks=pytest.mark.extended)],
)
def test_offloaded_inputs_are_not_memory_of_the_device(tables: dict[str, Any]) -> None:
    """Two inputs are on the device at a time: the one in use and the one that returns."""
    plain, away = dried({}, **tables), dried({"offload": "cpu"}, **tables)
    # the backward of a compiled block holds its input itself
    before, after = (found.peak.terms["activations"] + found.peak.terms["temporaries"] for found in (plain, away))
    assert before - after == (BLOCKS - 2) * INPUT_BYTES
    assert plain.peak_bytes - away.peak_bytes == pytest.approx((BLOCKS - 2) * INPUT_BYTES, rel=0.1)
    assert away.flops == plain.flops
    assert away.traffic == plain.traffic


@pytest.mark.extended
def test_on_a_cpu_the_host_s_memory_is_the_device_s() -> None:
    plain, away = dried({}, on_gpu=False), dried({"offload": "cpu"}, on_gpu=False)
    assert away.peak_bytes >= plain.peak_bytes


def test_partitioned_inputs_are_shares() -> None:
    tables = {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}, "data_parallel": {"zero": 0}}
    plain, shared, both = (
        dried(kept, **tables) for kept in ({}, {"partition": True}, {"partition": True, "offload": "cpu"})
    )
    assert plain.peak.terms["activations"] - shared.peak.terms["activations"] == BLOCKS * INPUT_BYTES // 2
    assert shared.peak.terms["activations"] - both.peak.terms["activations"] == (BLOCKS - 2) * INPUT_BYTES // 2
    for found in (shared, both):
        extra = [row for row in found.traffic if row not in plain.traffic]
        (row,) = extra
        assert (row["axis"], row["collective"], row["phase"]) == ("tp", "all_gather", "backward")
        assert row["count"] == BLOCKS
        assert row["bytes"] == BLOCKS * INPUT_BYTES // 2  # sent by one rank of two


@pytest.mark.extended
@pytest.mark.parametrize(
    "tables",
    [
        {"activations": {"offload_blocks": 6}, "data_parallel": {"zero": 3}},
        {"activations": {"offload_blocks": 3}},
        {
            "activations": {"policy": "budget", "mixture": [3, 1], "offload_blocks": 2},
            "pipeline": {"microbatches": 2},
        },
    ],
)
def test_the_planner_agrees_on_saved_tensors_of_further_blocks(tables: dict[str, Any]) -> None:
    """Of the blocks that leave, two are on the device at a time; the host has all of them."""
    plan = Plan.from_tables(
        {**tables, "precision": {"preset": "bf16"}, "activations": {"offload": "cpu", **tables["activations"]}}
    )
    found, predicted = dry_run(WIDE, plan), estimate_plan(WIDE, plan, "1xH200")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.02)
    assert predicted.offload.host_terms["activations"] == pytest.approx(found.host_terms["activations"], rel=0.02)
