"""The ledger: bytes counted on live tensors by term, and a JSON document with every promised part."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import build_engine, global_batch, train_steps

from weft.core.terms import MemoryTerm, TimeTerm
from weft.engine.optim.optimizers import Kind, OptimizerPolicy
from weft.train.ledger.ledger import build_ledger, gather_memory, memory_terms, peak_memory_bytes
from weft.train.ledger.offloaded import offload_rows


@pytest.mark.parametrize(("kind", "moments"), [("adamw", 2), ("sgd", 1)])
def test_memory_terms_are_those_of_the_tensors(kind: Kind, moments: int) -> None:
    engine = build_engine("llama", optimizer=OptimizerPolicy(kind=kind), frozen=["model.embed_tokens.*"])
    train_steps(engine, 1)
    terms = memory_terms(engine)
    every = sum(4 * p.numel() for p in engine.model.parameters())
    trainable = every - 4 * engine.model.get_parameter("model.embed_tokens.weight").numel()
    counters = 4 * len(engine.parameters) if kind == "adamw" else 0
    assert terms[MemoryTerm.WEIGHTS] == every
    assert terms[MemoryTerm.GRADIENTS] == trainable
    assert terms[MemoryTerm.OPTIMIZER_STATE] == moments * trainable + counters
    assert terms[MemoryTerm.BUFFERS] == sum(buffer.nbytes for buffer in engine.model.buffers())
    assert sum(terms.values()) <= peak_memory_bytes(torch.device("cpu"))


def test_the_document() -> None:
    engine = build_engine("llama")
    records = [engine.step(global_batch(step)) for step in range(3)]
    memory = gather_memory(engine)
    assert [row["rank"] for row in memory] == [0]
    ledger = build_ledger(
        engine,
        run_facts={"status": "finished", "steps": 3},
        model_name="llama",
        notes=["a note"],
        memory_ranks=memory,
        metrics=records,
        seconds_per_step=dict.fromkeys(TimeTerm, 0.25),
        checkpoints=[],
    )
    parsed = json.loads(json.dumps(ledger))
    assert parsed["run"]["first_loss"] == records[0].loss
    assert parsed["run"]["final_loss"] == records[-1].loss
    assert parsed["run"]["strategy"] == "single device"
    assert parsed["model"]["parameters"] == sum(p.numel() for p in engine.model.parameters())
    assert parsed["model"]["units"][-1] == "(root)"
    counted = {
        MemoryTerm.WEIGHTS,
        MemoryTerm.GRADIENTS,
        MemoryTerm.OPTIMIZER_STATE,
        MemoryTerm.BUFFERS,
        MemoryTerm.OTHER,
    }
    assert set(parsed["memory"]["terms"]) == {str(term) for term in counted}  # what a run can tell apart by itself
    assert parsed["memory"]["terms"]["weights"]["measured"] == memory[0]["terms"]["weights"]
    row = {"predicted": None, "dry_run": None, "measured": 0.25, "error": None}
    assert parsed["time"]["terms"]["data"] == row
    assert {row["component"] for row in parsed["dtypes"]} >= {"weights", "gradients"}
    assert len(parsed["coverage"]) == len(list(engine.model.named_parameters()))


def test_offload_has_host_memory_by_term() -> None:
    engine = build_engine("llama", {"offload": {"optimizer": "cpu", "update": "device"}})
    found = offload_rows(engine, None)
    assert found is not None
    moments = engine.host_terms()["moments"]
    assert moments >= 8 * sum(parameter.numel() for parameter in engine.parameters)
    row = {"predicted": None, "dry_run": None, "measured": moments, "error": None}
    assert found["host"]["terms"] == {"moments": row}
    assert found["host"]["total"] == row
    assert found["host"]["process_peak_bytes"] > moments
    assert found["transfers"] == []
    assert offload_rows(build_engine("llama"), None) is None


def test_copies_in_memory_are_host_memory() -> None:
    copies: Any = SimpleNamespace(host_bytes=620, num_files=2)
    found = offload_rows(build_engine("llama"), None, copies)
    assert found is not None
    assert found["host"]["terms"] == {"copies": {"predicted": None, "dry_run": None, "measured": 620, "error": None}}
    terms = {MemoryTerm.WEIGHTS: 100, MemoryTerm.OPTIMIZER_STATE: 200, MemoryTerm.GRADIENTS: 50}
    prediction: Any = SimpleNamespace(estimate=SimpleNamespace(offload=None, memory_terms=terms))
    found = offload_rows(build_engine("llama"), prediction, copies)
    assert found is not None
    assert found["host"]["total"]["predicted"] == 600


def test_copies_are_hidden_as_far_as_their_time_is() -> None:
    engine = build_engine("llama", {"offload": {"optimizer": "cpu", "update": "device"}})
    copied = {"phase": "update", "in_bytes": 60, "out_bytes": 40, "seconds": 2.0, "exposed_s": 0.5}
    record = SimpleNamespace(host_terms={"moments": 50}, transfers=[copied])
    prediction: Any = SimpleNamespace(estimate=SimpleNamespace(offload=record))
    found = offload_rows(engine, prediction)
    assert found is not None
    assert found["transfers"] == [{**copied, "hidden_bytes": 75, "exposed_bytes": 25}]
    assert found["host"]["terms"]["moments"]["predicted"] == 50


def test_a_run_without_a_step() -> None:
    engine = build_engine("llama")
    ledger = build_ledger(
        engine,
        run_facts={},
        model_name="llama",
        notes=[],
        memory_ranks=gather_memory(engine),
        metrics=[],
        seconds_per_step={},
        checkpoints=[],
    )
    assert ledger["run"]["final_loss"] is None
    assert ledger["time"]["step_s"] == 0.0
