"""Offloaded states in a dry run: host memory is no memory of the device, and nothing of it is pinned or allocated."""

from __future__ import annotations

from functools import cache
from pathlib import Path
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
        "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 8000,
    },
}  # fmt: skip
RUN = RunSpec.from_tables({"model": LLAMA, "data": {"sequence_length": 256}, "train": {"global_batch": 8}})
REPLICATED: dict[str, Any] = {"mesh": {"dp_replicate": 4}, "pipeline": {"microbatches": 2}}
SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}}
AWAY = {"optimizer": "cpu", "parameters": "cpu", "update": "host"}


def of(tables: dict[str, Any], **offload: str) -> DryRun:
    given = {**tables, "precision": {"preset": "bf16"}}
    return dry_run(RUN, Plan.from_tables({**given, "offload": offload} if offload else given))


@cache
def without_offload(is_sharded: bool) -> DryRun:
    return of(SHARDED if is_sharded else {})


@pytest.mark.parametrize("update", ["auto", "host"])
@pytest.mark.parametrize("tables", [{}, SHARDED], ids=["one rank", "ZeRO-3"])
def test_the_peak_falls_by_the_moments_and_by_nothing_else(tables: dict[str, Any], update: str) -> None:
    without, found = without_offload(bool(tables)), of(tables, optimizer="cpu", update=update)
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
        pytest.param(
            {
                "pipeline": {"microbatches": 2},
                "offload": {"optimizer": "cpu", "update": "device", "masters": "host"},
            },
            marks=pytest.mark.extended,
        ),
        pytest.param(
            {
                "mesh": {"dp_replicate": 4},
                "pipeline": {"microbatches": 2},
                "offload": {"optimizer": "cpu", "update": "host", "masters": "host"},
            },
            marks=pytest.mark.extended,
        ),
        {**SHARDED, "offload": {"optimizer": "cpu", "update": "device", "masters": "host"}},
        pytest.param(
            {
                "mesh": {"dp_replicate": 4},
                "pipeline": {"microbatches": 2},
                "offload": {"optimizer": "cpu", "update": "device", "staging_bytes": 2**26, "chunk_elements": 2**17},
            },
            marks=pytest.mark.extended,
        ),
        {"pipeline": {"microbatches": 2}, "offload": {"optimizer": "cpu", "parameters": "cpu", "update": "device"}},
        *(
            pytest.param(
                {**SHARDED, "data_parallel": {"zero": zero}, "offload": AWAY, "activations": {"policy": "full"}},
                marks=pytest.mark.extended,
            )
            for zero in (1, 2, 3)
        ),
    ],
    ids=[
        *("DDP, device", "ZeRO-3, host", "DDP, late", "ZeRO-3, late", "ZeRO-3, late on the host", "inputs on the host"),
        *("masters from one device", "masters, DDP, host", "masters, ZeRO-3", "staging"),
        *("weights from one device", "weights, ZeRO-1, host", "weights, ZeRO-2, host", "weights, ZeRO-3, host"),
    ],
)
def test_the_planner_agrees(tables: dict[str, Any]) -> None:
    plan = Plan.from_tables({**tables, "precision": {"preset": "bf16"}})
    found, predicted = dry_run(RUN, plan), estimate_plan(RUN, plan, f"{plan.num_ranks}xH100-80GB")
    inside = predicted.memory_bytes - predicted.memory_terms["framework"]
    assert inside == pytest.approx(found.peak_bytes, rel=0.02)
    assert found.host_terms.keys() == predicted.offload.host_terms.keys()
    for term, nbytes in found.host_terms.items():
        assert predicted.offload.host_terms[term] == pytest.approx(nbytes, rel=0.02), term
    if plan.offload.parameters == "cpu":
        assert str(Term.WEIGHTS) not in found.peak.terms
        assert predicted.memory_terms["communication_buffers"] == pytest.approx(
            found.peak.terms.get("communication_buffers", 0), rel=0.02
        )


@pytest.mark.parametrize(("durable", "copies"), [("checkpoint", 1), ("step", 2)])
def test_states_in_files_are_named_by_term_and_no_file_is_made(
    durable: str, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = of({}, optimizer="nvme", update="device", durable=durable)
    assert list(tmp_path.iterdir()) == []
    count = found.num_parameters
    padding = 1.1  # the begins of parameters are aligned to pages
    for name, nbytes in (("masters", 4), ("moments", 8)):
        assert 1 <= found.file_terms[name] / (copies * nbytes * count) < padding
    assert found.host_terms == {"staging": pytest.approx(3 * 12 * count, rel=padding - 1)}  # less than a chunk
    assert found.as_dict()["disk"]["terms"] == found.file_terms
    on_host = of({}, optimizer="cpu", update="device")
    assert on_host.file_terms == {}
    assert on_host.host_terms["moments"] == pytest.approx(8 * count, rel=padding - 1)


@pytest.mark.parametrize("delayed", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_planner_knows_the_host_memory_of_8_bit_states(delayed: bool) -> None:
    offload = {"optimizer": "cpu", "update": "device", "delayed": delayed}
    plan = Plan.from_tables({**SHARDED, "precision": {"preset": "bf16"}, "offload": offload})
    tables = RUN.model_dump(mode="json", exclude_none=True)
    run = RunSpec.from_tables({**tables, "train": {**tables["train"], "optimizer": "adamw8bit"}})
    with fake_world(num_ranks=4, rank=0, attention=None) as world:
        training = FakeTraining(run, plan)
        with world.mode:
            training.build()
        assert training.engine.offload is not None
        found = training.engine.offload.memory.host_bytes
    predicted = sum(estimate_plan(run, plan, "4xH100-80GB").offload.host_terms.values())
    assert predicted == pytest.approx(found, rel=0.02)
