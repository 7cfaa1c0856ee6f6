"""The reference rounds gradients and weights on their way wherever ranks of the plan send them."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.exercise import plan_precision

TRAIN = RunSpec.from_tables({"model": {"type": "llama"}}).train
CODED = {"precision": {"preset": "bf16", "reduce": "int8", "gather": "int8"}}


@pytest.mark.parametrize(
    ("mesh", "zero", "expected"),
    [
        ({}, 0, ("float32", None, False)),
        ({"dp_replicate": 2}, 0, ("int8", None, True)),
        ({"dp_shard": 2}, 3, ("int8", "int8", False)),
        # ranks of cp are further replicas, or shards
        ({"cp": 2}, 0, ("int8", None, True)),
        ({"cp": 2}, 2, ("int8", "int8", False)),
        ({"dp_replicate": 2, "cp": 2}, 3, ("int8", "int8", True)),
        ({"dp_shard": 2, "cp": 2}, 3, ("int8", "int8", False)),
    ],
)
def test_context_parallel_ranks_send_codes_too(mesh: dict[str, int], zero: int, expected: tuple[Any, ...]) -> None:
    plan = Plan.from_tables({"mesh": mesh, "data_parallel": {"zero": zero}, "pipeline": {"microbatches": 2}, **CODED})
    found = plan_precision(plan, TRAIN)
    assert (found.reduce, found.gather, found.rounds_sums) == expected
    assert found.chunks_per_sum == (2 if zero < 2 and found.reduce == "int8" else 1)
