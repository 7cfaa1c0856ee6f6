"""`data_parallel.all_reduce` in the planner: bytes and seconds of each algorithm, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import one, request_of, tiny_llama, view_with

from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.core.terms import StepTerm
from weft.plan.plan_rows import columns_of, plan_at
from weft.plan.time.step_time import estimate_time
from weft.plan.traffic import estimate_traffic


def plan_with(**tables: Any) -> Plan:
    return Plan.from_tables(tables)


@pytest.mark.parametrize(
    ("tables", "word"),
    [
        ({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3, "all_reduce": "ring"}}, "sharded gradients"),
        ({"mesh": {"dp_shard": 2, "dp_replicate": 2}, "data_parallel": {"zero": 3, "all_reduce": "tree"}}, "HSDP"),
        ({"data_parallel": {"strategy": "dataparallel", "all_reduce": "star"}}, "dataparallel"),
    ],
)
def test_what_torch_alone_sums_is_refused_by_name(tables: dict[str, Any], word: str) -> None:
    reasons = [sentence for sentence, _ in not_executed_reasons(plan_with(**tables))]
    assert any(word in sentence and "data_parallel.all_reduce" in sentence for sentence in reasons)


@pytest.mark.parametrize(
    "tables",
    [
        {"mesh": {"dp_replicate": 4}, "data_parallel": {"all_reduce": "halving"}},
        {"mesh": {"dp_replicate": 2, "pp": 2}, "data_parallel": {"all_reduce": "ring"}},
        {"mesh": {"dp_replicate": 2, "dp_shard": 2, "pp": 2}, "data_parallel": {"zero": 1, "all_reduce": "ring"}},
        {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}},
    ],
)
def test_replicas_may_choose(tables: dict[str, Any]) -> None:
    assert list(not_executed_reasons(plan_with(**tables))) == []


SIX_BLOCKS = request_of(tiny_llama(), "2x4xH100-80GB@ethernet-10", global_batch=16, sequence_length=128)
S = 4 * SIX_BLOCKS.shape.num_parameters  # gradients in float32


def priced(name: str, *, dp: int = 8, **keys: Any) -> tuple[float, float]:
    """(bytes sent, seconds of exposed communication) of a step."""
    view = view_with(SIX_BLOCKS, dp_replicate=dp, all_reduce=name, **keys)
    (row,) = (row for row in estimate_traffic(view).rows if row.axis == "dp_replicate")
    return one(row.bytes), one(estimate_time([view]).terms[StepTerm.DP_COMM])


def test_bytes_are_those_of_the_algorithm() -> None:
    shares = {
        "auto": 14 / 8,
        "ring": 14 / 8,
        "star": 7,
        "naive": 7,
        "tree": 3,
        "halving": 14 / 8,
        "hierarchical": 14 / 8,
    }
    for name, share in shares.items():
        assert priced(name)[0] == pytest.approx(share * S), name
    assert priced("halving", dp=6, microbatches=1)[0] == pytest.approx((1 + 2 * 3 / 4) * S)


def test_on_slow_links_the_planner_ranks_algorithms_by_what_passes_them() -> None:
    """10 Gb/s between two nodes of four: a quarter of the tensor passes hierarchically, 14 S through a star."""
    seconds = {name: priced(name)[1] for name in ("ring", "star", "naive", "tree", "hierarchical")}
    assert seconds["hierarchical"] < seconds["ring"] < seconds["tree"] < seconds["naive"] < seconds["star"]
    link = SIX_BLOCKS.cluster.between
    # the backward hides next to nothing, and the last of two buckets is counted as exposed in any case
    assert seconds["star"] == pytest.approx(1.5 * 14 * S / link.bytes_per_s, rel=0.02)
    assert seconds["star"] / seconds["naive"] == pytest.approx(2, rel=0.1)


def test_a_plan_of_the_table_prints_its_algorithm() -> None:
    plan = Plan.from_tables({"mesh": {"dp_replicate": 8}, "data_parallel": {"all_reduce": "tree"}})
    table = columns_of([plan])
    assert plan_at(table, 0, precision={"preset": "fp32"}).data_parallel.all_reduce == "tree"
