"""Offloaded states in a dry run: host memory is no memory of the device, and nothing of it is pinned or allocated."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.dryrun.run import DryRun, FakeTraining, dry_run
from weft.dryrun.world import fake_world
from weft.plan.ask import estimate_plan

LLAMA = {
    "type": "llama",
    "config": {
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8000,
    },
}  # fmt: skip
RUN = RunSpec.from_tables({"model": LLAMA, "data": {"sequence_length": 256}, "train": {"global_batch": 8}})
REPLICATED: dict[str, Any] = {"mesh": {"dp_replicate": 4}, "pipeline": {"microbatches": 2}}
SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}}


def of(tables: dict[str, Any], **offload: str) -> DryRun:
    given = {**tables, "precision": {"preset": "bf16"}}
    return dry_run(RUN, Plan.from_tables({**given, "offload": offload} if offload else given))


@pytest.mark.parametrize("update", ["auto", "host"])
@pytest.mark.parametrize("tables", [{}, SHARDED], ids=["one rank", "ZeRO-3"])
def test_the_peak_falls_by_the_moments_and_by_nothing_else(tables: dict[str, Any], update: str) -> None:
    without, found = of(tables), of(tables, optimizer="cpu", update=update)
    state = str(Term.OPTIMIZER_STATE)
    counters = found.peak.terms.get(state, 0)
    assert counters < 2**15  # a rounded number per parameter
    moments = without.peak.terms[state] - counters
    assert moments >= 8 * without.num_parameters / (4 if tables else 1) * 0.99
    assert {**without.peak.terms, state: counters} == found.peak.terms
    assert found.peak_bytes == without.peak_bytes - moments
    assert found.moments["saving_host_bytes"] == without.moments["saving_host_bytes"]
    assert found.moments["resuming_bytes"] < without.moments["resuming_bytes"]


@pytest.mark.parametrize(
    "tables",
    [
        {
            "mesh": {"dp_replicate": 4},
            "pipeline": {"microbatches": 2},
            "offload": {"optimizer": "cpu", "update": "device"},
        },
        {**SHARDED, "offload": {"optimizer": "cpu", "update": "host"}},
        {**REPLICATED, "offload": {"optimizer": "cpu", "update": "device", "delayed": True}},
        {**SHARDED, "offload": {"optimizer": "cpu", "update": "device", "delayed": True}},
        {**SHARDED, "offload": {"optimizer": "cpu", "update": "host", "delayed": True}},
        {**SHARDED, "activations": {"policy": "full", "offload": "cpu"}},
    ],
    ids=["DDP, device", "ZeRO-3, host", "DDP, late", "ZeRO-3, late", "ZeRO-3, late on the host", "inputs on the host"],
)
def test_the_planner_agrees(tables: dict[str, Any]) -> None:
    plan = Plan.from_tables({**tables, "precision": {"preset": "bf16"}})
    found, predicted = dry_run(RUN, plan), estimate_plan(RUN, plan, "4xH100-80GB")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("delayed", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_planner_knows_the_host_memory_of_a_rank(delayed: bool, optimizer: str) -> None:
    offload = {"optimizer": "cpu", "update": "device", "delayed": delayed}
    plan = Plan.from_tables({**SHARDED, "precision": {"preset": "bf16"}, "offload": offload})
    tables = RUN.model_dump(mode="json", exclude_none=True)
    run = RunSpec.from_tables({**tables, "train": {**tables["train"], "optimizer": optimizer}})
    with fake_world(num_ranks=4, rank=0, attention=None) as world:
        training = FakeTraining(run, plan)
        with world.mode:
            training.build()
        assert training.engine.offload is not None
        found = training.engine.offload.host_bytes
    predicted = sum(estimate_plan(run, plan, "4xH100-80GB").offload.host_terms.values())
    assert predicted == pytest.approx(found, rel=0.02)
