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


@pytest.mark.parametrize(
    ("tables", "hint"),
    [
        (
            {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3, "bucket_bytes": 2048}},
            "remove data_parallel.bucket_bytes; docs/status.md lists what works",
        ),
        # without the stage, dp_shard implies ZeRO-3; without the format, error feedback would contradict itself
        (
            {
                "mesh": {"dp_shard": 2},
                "data_parallel": {"error_feedback": True},
                "precision": {"preset": "fp16", "reduce": "bfloat16"},
            },
            "remove precision.preset, or remove data_parallel.error_feedback; docs/status.md lists what works",
        ),
        (
            {"mesh": {"cp": 2, "ep": 2}},
            "set mesh.ep = 1; docs/status.md lists what works",
        ),
    ],
)
def test_a_hint_names_keys_without_which_the_plan_is_executed(tables: dict[str, Any], hint: str) -> None:
    assert [said for _, said in not_executed_reasons(Plan.from_tables(tables))] == [hint]


@pytest.mark.parametrize(
    "keys", [{"policy": "none"}, {"policy": "selective"}, {"policy": "budget", "mixture": [0, 1]}], ids=str
)
def test_inputs_leave_only_where_a_block_is_fully_recomputed(keys: dict[str, Any]) -> None:
    plan = Plan.from_tables({"activations": {**keys, "offload": "cpu"}})
    assert any("leave the device" in sentence for sentence, _ in not_executed_reasons(plan))
    full = {"policy": "budget", "mixture": [1, 1], "offload": "cpu"}
    assert not list(not_executed_reasons(Plan.from_tables({"activations": full})))
