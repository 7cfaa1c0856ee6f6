"""Plans on another number of ranks: only data-parallel degrees and micro-batches change, and the batch is the same."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.errors import MeshError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.other_ranks import usable_ranks, with_data_parallel_ranks
from weft.plan.resolve import most_ranks, resolve

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def run_of(global_batch: int) -> RunSpec:
    return RunSpec.from_tables(
        {"model": {"type": "llama", "config": CONFIG}, "train": {"global_batch": global_batch, "steps": 2}}
    )


def plan_of(mesh: dict[str, int], *, zero: int = 0, microbatches: int = 1) -> Plan:
    return Plan.from_tables(
        {
            "mesh": mesh,
            "data_parallel": {"zero": zero, "elastic": True},
            "pipeline": {"microbatches": microbatches},
        }
    )


def degrees(plan: Plan) -> dict[str, int]:
    return {axis: size for axis, size in plan.mesh.sizes().items() if size > 1}


@pytest.mark.parametrize(
    ("mesh", "zero", "num_ranks", "found", "microbatches"),
    [
        ({"dp_replicate": 4}, 0, 3, {"dp_replicate": 3}, 2),  # 6 rows each -> 8, in micro-batches of at most 6
        ({"dp_replicate": 4}, 0, 2, {"dp_replicate": 2}, 2),
        ({"dp_shard": 4}, 3, 2, {"dp_shard": 2}, 2),
        ({"dp_replicate": 2, "dp_shard": 2}, 3, 6, {"dp_replicate": 3, "dp_shard": 2}, 1),
        ({"dp_replicate": 2, "dp_shard": 4}, 3, 4, {"dp_shard": 4}, 2),
        ({"dp_replicate": 2, "dp_shard": 4}, 3, 6, {"dp_replicate": 3, "dp_shard": 2}, 2),
        ({"dp_replicate": 2, "tp": 2}, 0, 2, {"tp": 2}, 2),
        ({"dp_shard": 4, "pp": 2}, 1, 4, {"dp_shard": 2, "pp": 2}, 2),
        ({"dp_shard": 2}, 3, 4, {"dp_shard": 4}, 1),  # and back to more
    ],
)
def test_data_parallel_degrees_change_and_micro_batches_do_not_grow(
    mesh: dict[str, int], zero: int, num_ranks: int, found: dict[str, int], microbatches: int
) -> None:
    plan, run = plan_of(mesh, zero=zero), run_of(24)
    changed = with_data_parallel_ranks(plan, run, num_ranks)
    assert degrees(changed) == found
    assert (changed.num_ranks, changed.pipeline.microbatches) == (num_ranks, microbatches)
    rows = 24 // (changed.mesh.dp_degree * microbatches)
    assert rows * changed.mesh.dp_degree * microbatches == 24
    assert rows <= 24 // plan.mesh.dp_degree
    kept = {"mesh": plan.mesh, "pipeline": plan.pipeline}
    assert changed.model_copy(update=kept) == plan


def test_micro_batches_divide_the_rows_of_a_rank() -> None:
    """30 rows: 2 micro-batches of 3 on 5 ranks; 10 rows on each of 3 ranks are 5 micro-batches of 2, not 3 of 3."""
    changed = with_data_parallel_ranks(plan_of({"dp_replicate": 5}, microbatches=2), run_of(30), 3)
    assert (changed.mesh.dp_replicate, changed.pipeline.microbatches) == (3, 5)


def test_expert_parallelism_shrinks_to_what_divides() -> None:
    run = RunSpec.from_tables(
        {
            "model": {"type": "mixtral", "config": {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2}},
            "train": {"global_batch": 24, "steps": 2},
        }
    )
    plan = plan_of({"dp_shard": 4, "ep": 4}, zero=3)
    assert with_data_parallel_ranks(plan, run, 2).mesh.ep == 2
    assert with_data_parallel_ranks(plan, run, 4).mesh.ep == 4


def test_numbers_that_do_not_fit_are_refused_and_the_next_smaller_is_known() -> None:
    plan, run = plan_of({"dp_replicate": 4, "tp": 2}), run_of(24)
    with pytest.raises(MeshError, match="takes 2 ranks, and 5 is no multiple"):
        with_data_parallel_ranks(plan, run, 5)
    with pytest.raises(MeshError, match=r"does not run on 10 ranks: .*batch of 24"):
        with_data_parallel_ranks(plan, run, 10)
    assert [usable_ranks(plan, run, most) for most in (1, 2, 5, 7, 10, 11, 12)] == [0, 2, 4, 6, 8, 8, 12]


def test_a_plan_allows_it_by_its_key_or_by_having_no_mesh() -> None:
    tables: dict[str, Any] = {"mesh": {"dp_replicate": 4}}
    run = run_of(24)
    with pytest.raises(MeshError, match=r"4 ranks .* but 3 were asked for"):
        resolve(tables, run, on_gpu=False, num_ranks=3)
    elastic = {**tables, "data_parallel": {"elastic": True}}
    assert resolve(elastic, run, on_gpu=False, num_ranks=3).mesh.dp_replicate == 3
    assert [most_ranks(tables, run, most) for most in (3, 5)] == [0, 4]
    assert [most_ranks(elastic, run, most) for most in (3, 5)] == [3, 4]
    assert [most_ranks({}, run, most) for most in (3, 5)] == [3, 4]


@pytest.mark.parametrize(("num_ranks", "size"), [(12, 4), (8, 4), (4, 0), (6, 0)])
def test_a_secondary_shard_stays_where_it_divides(num_ranks: int, size: int) -> None:
    tables = {"mesh": {"dp_shard": 16}, "data_parallel": {"zero": 3, "elastic": True, "secondary_shard": 4}}
    changed = with_data_parallel_ranks(Plan.from_tables(tables), run_of(48), num_ranks)
    assert (changed.mesh.dp_shard, changed.data_parallel.secondary_shard) == (num_ranks, size)
