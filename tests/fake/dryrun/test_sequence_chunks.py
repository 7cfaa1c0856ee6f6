"""Dry runs of MLPs in chunks: the peak falls by what is inside an MLP, and the planner's peak falls with it."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.dryrun.record import DryRun
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

BLOCKS, ROWS, LENGTH, WIDTH, CHUNK = 4, 2, 8192, 2048, 512
CONFIG = {
    "hidden_size": 512, "intermediate_size": WIDTH, "num_hidden_layers": BLOCKS, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": LENGTH,
}  # fmt: skip
INSIDE = 4 * ROWS * LENGTH * WIDTH * 2  # gate, act(gate), up and their product in bfloat16, of a block
FULL: dict[str, Any] = {"activations": {"policy": "full"}}


def run_of(rows: int) -> RunSpec:
    return RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": CONFIG},
            "data": {"sequence_length": LENGTH},
            "train": {"global_batch": rows},
        }
    )


def plan_of(tables: dict[str, Any], chunk: int) -> Plan:
    activations = {**tables.get("activations", {}), "sequence_chunk": chunk}
    return Plan.from_tables({"precision": {"preset": "bf16"}, **tables, "activations": activations})


def peaks(tables: dict[str, Any], *, rows: int = ROWS) -> tuple[DryRun, DryRun, float]:
    """Dry runs without and with chunks, and the planner's peak with them."""
    whole, chunked = (dry_run(run_of(rows), plan_of(tables, chunk)) for chunk in (0, CHUNK))
    plan = plan_of(tables, CHUNK)
    predicted = estimate_plan(run_of(rows), plan, f"{plan.num_ranks}xH200")
    return whole, chunked, predicted.memory_bytes - predicted.memory_terms["framework"]


def test_no_block_keeps_what_is_inside_its_mlp() -> None:
    whole, chunked, predicted = peaks({})
    assert whole.peak_bytes - chunked.peak_bytes == BLOCKS * INSIDE
    assert predicted == pytest.approx(chunked.peak_bytes, rel=0.02)


@pytest.mark.extended
def test_a_recomputed_block_has_one_chunk_at_a_time() -> None:
    """With a chunk inside the MLP, the largest instant is another one: the norm before it."""
    whole, chunked, predicted = peaks(FULL)
    assert whole.peak_bytes - chunked.peak_bytes == pytest.approx(INSIDE, rel=0.001)
    assert predicted == pytest.approx(chunked.peak_bytes, rel=0.03)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("tables", "rows"),
    [
        ({**FULL, "mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}, 4),
        ({**FULL, "mesh": {"cp": 2}}, 2),
        ({"mesh": {"pp": 2}, "pipeline": {"microbatches": 4}}, 8),
    ],
)
def test_the_planner_s_peak_in_other_layouts(tables: dict[str, Any], rows: int) -> None:
    whole, chunked, predicted = peaks(tables, rows=rows)
    assert chunked.peak_bytes < whole.peak_bytes
    assert 0.95 <= chunked.peak_bytes / predicted <= 1.05
