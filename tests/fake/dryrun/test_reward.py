"""The planner counts a scalar head: its memory agrees with the dry run, and a search keeps the vocabulary whole."""

from __future__ import annotations

from typing import Any

import pytest
from samples import by_default

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.dryrun.run import dry_run
from weft.plan.ask import ask, estimate_plan, search_plans

WITHIN = 0.02
VOCABULARY, LENGTH = 8192, 256
CONFIG = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", "config": CONFIG},
    "tied": {"type": "qwen3", "config": {**CONFIG, "tie_word_embeddings": True}},
}
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
}


def a_run(model: str, kind: str = "reward") -> RunSpec:
    return RunSpec.from_tables(
        {
            "model": MODELS[model],
            "objective": {"kind": kind},
            "data": {"format": "preference", "sequence_length": LENGTH},
            "train": {"global_batch": 16},
        }
    )


@pytest.mark.parametrize(
    ("model", "name"),
    by_default([("tied", "ZeRO-3")], [(m, p) for m in MODELS for p in PLANS], extended=[("llama", "pp")]),
)
def test_memory_of_the_planner_is_that_of_the_dry_run(model: str, name: str) -> None:
    plan = Plan.from_tables({**PLANS[name], "precision": {"preset": "bf16"}, "compile": {"enabled": False}})
    place: Any = "first" if plan.mesh.pp > 1 else None
    planned = estimate_plan(a_run(model), plan, f"{plan.num_ranks}xH100-80GB", place=place)
    found = dry_run(a_run(model), plan).peak
    for term in (Term.WEIGHTS, Term.OPTIMIZER_STATE):
        assert planned.memory_terms[term] == pytest.approx(found.terms[term], rel=WITHIN), term
    own = sum(value for term, value in planned.memory_terms.items() if term != Term.FRAMEWORK)
    assert own == pytest.approx(sum(found.terms.values()), rel=WITHIN)
    assert planned.memory_terms[Term.LOGITS] < 1e5  # one number per token, not one per word


def test_a_scalar_head_has_one_row_and_no_tie() -> None:
    shapes = {kind: ask(a_run("tied", kind), "1xH100-80GB").request.shape for kind in ("orpo", "reward")}
    added = shapes["reward"].num_parameters - shapes["orpo"].num_parameters
    assert added == CONFIG["hidden_size"]
    assert shapes["orpo"].scored.num_parameters == shapes["reward"].num_parameters


def test_a_search_does_not_shard_the_vocabulary() -> None:
    found = search_plans(a_run("llama"), "8xH100-80GB")
    assert found.plans
    assert {one.plan.mesh.tp for one in found.plans} == {1}
