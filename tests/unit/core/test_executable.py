"""Which plans the engine executes, and the reasons against the others: experts, weights on the host."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan

EXPERTS = {"dp_shard": 2, "ep": 2}


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": EXPERTS},
        {"mesh": EXPERTS, "compile": {"enabled": True}},
        {"mesh": EXPERTS, "float8": {"linears": "all"}},
        {"mesh": {**EXPERTS, "pp": 2}, "pipeline": {"schedule": "zero_bubble", "microbatches": 4}},
        {"mesh": {**EXPERTS, "dp_replicate": 2}, "activations": {"policy": "full"}},
        {"mesh": {**EXPERTS, "tp": 2}},
        {"mesh": {**EXPERTS, "tp": 2}, "expert_parallel": {"tensor": "width"}},
    ],
)
def test_experts_are_divided_with_every_feature(tables: dict[str, Any]) -> None:
    assert list(not_executed_reasons(Plan.from_tables(tables))) == []


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"mesh": {**EXPERTS, "tp": 4}, "tensor_parallel": {"mode": "2d"}}, "with tensor_parallel.mode = '2d'"),
        ({"mesh": {"tp": 2, "pp": 2, "ep": 2}, "pipeline": {"schedule": "pipedream"}}, "with pipedream"),
    ],
)
def test_a_refusal_names_what_experts_are_combined_with(tables: dict[str, Any], words: str) -> None:
    sentences = [sentence for sentence, _ in not_executed_reasons(Plan.from_tables(tables))]
    assert any("expert parallelism" in sentence and words in sentence for sentence in sentences)


@pytest.mark.parametrize("optimizer", ["none", "nvme"])
def test_the_hint_for_weights_on_the_host_names_the_missing_half(optimizer: str) -> None:
    plan = Plan.from_tables({"offload": {"parameters": "cpu", "optimizer": optimizer}})
    hints = [hint for sentence, hint in not_executed_reasons(plan) if "offload.parameters" in sentence]
    assert hints == ["set offload.optimizer = 'cpu'"]
