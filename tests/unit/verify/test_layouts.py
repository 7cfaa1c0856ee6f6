"""A checkpoint of any plan is resumed under another layout, which must be one that weft executes."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.verify.layouts import other_layout

SHARDED: dict[str, Any] = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
REPLICATED: dict[str, Any] = {"mesh": {"dp_replicate": 2}}
BF16 = {"precision": {"preset": "bf16"}}
PLANS: list[dict[str, Any]] = [
    *(
        {**layout, **BF16, **feature}
        for layout in (SHARDED, REPLICATED, {"mesh": {"cp": 2}, "data_parallel": {"zero": 3}})
        for feature in (
            {},
            {"offload": {"optimizer": "cpu"}},
            {"offload": {"optimizer": "cpu", "masters": "host"}},
            {"precision": {"preset": "bf16", "reduce": "int8"}},
            {"precision": {"preset": "bf16", "residual": "float32"}},
            {"activations": {"policy": "full", "offload": "cpu"}},
            {"float8": {"linears": "all"}},
        )
    ),
    {**SHARDED, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    {**SHARDED, "offload": {"optimizer": "cpu", "delayed": True}},
    {**SHARDED, "precision": {"preset": "bf16", "gather": "int8"}},
    {**SHARDED, "data_parallel": {"zero": 3, "error_feedback": True}, "precision": {"reduce": "int8"}},
    {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3, "secondary_shard": 2}},
    {
        "mesh": {"tp": 2},
        "tensor_parallel": {"sequence_parallel": False},
        "activations": {"policy": "full", "partition": True},
    },
    {"mesh": {"pp": 2}, "pipeline": {"schedule": "zbv", "virtual_stages": 2, "microbatches": 4}},
    {**REPLICATED, "precision": {"preset": "bf16", "gradients": "bfloat16"}, "pipeline": {"microbatches": 2}},
]


@pytest.mark.parametrize("tables", PLANS)
def test_the_other_layout_is_executed(tables: dict[str, Any]) -> None:
    plan = Plan.from_tables(tables)
    assert list(not_executed_reasons(plan)) == []
    other = other_layout(plan, global_batch=8)
    assert list(not_executed_reasons(other)) == []
    assert other.data_parallel.zero != plan.data_parallel.zero
    assert other.num_ranks == plan.num_ranks
