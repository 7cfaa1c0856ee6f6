"""The planner counts adapters: memory and traffic of frozen weights beside trained factors agree with the dry run."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize("name", PLANS)
def test_plan_and_dry_run_agree(name: str) -> None:
    run = RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": CONFIG},
            "adapter": {"kind": "lora", "rank": 16},
            "data": {"sequence_length": 512},
            "train": {"global_batch": 16},
        }
    )
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
