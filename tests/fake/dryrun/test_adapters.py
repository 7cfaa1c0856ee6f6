"""The planner counts adapters: memory and traffic of frozen weights beside trained factors agree with the dry run."""

from __future__ import annotations

from typing import Any

import pytest
from samples import by_default

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan

WITHIN = 0.05
CONFIG = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8192,
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}},
}


BYTES = {"bfloat16": 2.0, "int8": 1 + 2 / 64, "nf4": 0.5 + 2 / 64}  # of a frozen weight, with its scale


@pytest.mark.parametrize("base", by_default(["nf4"], BYTES, extended=["bfloat16", "int8"]))
def test_weights_of_a_low_base_are_counted(base: str) -> None:
    run = _run(base)
    plan = Plan.from_tables({"mesh": {"dp_replicate": 4}, "precision": {"preset": "bf16"}})
    planned, found = estimate_plan(run, plan, "4xH100-80GB"), dry_run(run, plan)
    seen = found.peak.terms
    blocks = 6 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408)
    factors = 6 * 16 * (2 * (512 + 512) + 2 * (512 + 256) + 3 * (512 + 1408))
    others = 2 * 8192 * 512 + 13 * 512
    assert seen[Term.WEIGHTS] == blocks * BYTES[base] + 4 * factors + 2 * others == planned.memory_terms[Term.WEIGHTS]
    assert planned.memory_terms[Term.GATHERED] == pytest.approx(seen[Term.GATHERED], rel=WITHIN)
    total = sum(value for term, value in planned.memory_terms.items() if term != Term.FRAMEWORK)
    assert total == pytest.approx(found.peak.peak_bytes, rel=WITHIN)


@pytest.mark.extended
def test_gathered_codes_are_counted() -> None:
    run = _run("nf4")
    plan = Plan.from_tables({**PLANS["ZeRO-3"], "precision": {"preset": "bf16"}})
    planned, found = estimate_plan(run, plan, "4xH100-80GB"), dry_run(run, plan)
    assert planned.memory_terms[Term.WEIGHTS] == pytest.approx(found.peak.terms[Term.WEIGHTS], rel=1e-3)
    gathered = ("dp_shard", "all_gather")
    assert backward(planned.traffic)[gathered] == pytest.approx(backward(found.traffic)[gathered], rel=1e-3)


def _run(base: str) -> RunSpec:
    return RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": CONFIG},
            "adapter": {"kind": "lora", "rank": 16, "base": base},
            "data": {"sequence_length": 512},
            "train": {"global_batch": 16},
        }
    )


@pytest.mark.parametrize("name", PLANS)
def test_plan_and_dry_run_agree(name: str) -> None:
    run = _run("model")
    plan = Plan.from_tables({**PLANS[name], "precision": {"preset": "bf16"}})
    planned, found = estimate_plan(run, plan, "4xH100-80GB"), dry_run(run, plan)
    expected, seen = planned.memory_terms, found.peak.terms
    for term in (Term.WEIGHTS, Term.GRADIENTS):
        assert expected[term] == seen[term]
    assert expected[Term.OPTIMIZER_STATE] == pytest.approx(seen[Term.OPTIMIZER_STATE], rel=WITHIN)
    assert seen[Term.OPTIMIZER_STATE] < seen[Term.WEIGHTS] / 8  # of factors alone
    total = sum(value for term, value in expected.items() if term != Term.FRAMEWORK)
    assert total == pytest.approx(found.peak.peak_bytes, rel=WITHIN)
    assert backward(planned.traffic) == backward(found.traffic)


def backward(rows: list[Any]) -> dict[tuple[str, str], int]:
    """Bytes of collectives in the backward, by axis and kind."""
    sent: dict[tuple[str, str], int] = {}
    for row in (row for row in rows if row["phase"] == "backward" and row["bytes"]):
        key = row["axis"], row["collective"]
        sent[key] = sent.get(key, 0) + row["bytes"]
    return sent
