"""Plans as columns and back; one plan alone gives what the same plan gives among thousands."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import columns_with, legal_plans, one, plan_with, request_of, requests, tiny_mixtral

from weft.core.plan import Pipeline as PipelineSection
from weft.core.plan import Plan
from weft.plan.columns import SCHEDULES, TP_MODES, Columns, array_names
from weft.plan.estimate import estimate_columns
from weft.plan.plan_rows import columns_of, plan_at
from weft.plan.request import Request


def test_every_schedule_and_mode_of_a_plan_file_has_its_index() -> None:
    """A name that plan.toml takes and a column cannot hold would be a crash for a valid file."""
    accepted = PipelineSection.model_fields["schedule"].annotation.__args__  # type: ignore[union-attr]
    assert set(accepted) == set(SCHEDULES)
    modes = Plan.model_fields["tensor_parallel"].annotation.model_fields["mode"].annotation.__args__  # type: ignore[union-attr]
    assert set(modes) == set(TP_MODES)


@pytest.mark.parametrize(
    "keys",
    [
        {"dp_shard": 8, "zero": 2, "microbatches": 4},
        {
            "dp_replicate": 3,
            "dp_shard": 2,
            "cp": 2,
            "tp": 4,
            "pp": 5,
            "ep": 8,
            "zero": 1,
            "attention": "ulysses",
            "split": "contiguous",
        },
        {"cp": 8, "zero": 3, "attention": "ring", "ulysses": 4},
        {"tp": 8, "mode": "2.5d", "sequence_parallel": False, "loss_parallel": False},
        {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "microbatches": 16, "policy": "full"},
        {"policy": "selective", "offload_activations": "cpu", "optimizer": "nvme", "parameters": "cpu"},
        {"policy": "full", "partition": True, "update": "host", "delayed": True, "durable": "step"},
        {"enabled": True, "pp": 2, "schedule": "pipedream_2bw"},
        {"pp": 4, "blocks": [5, 5, 5, 1]},
        {"policy": "budget", "mixture": [3, 8]},
        {"policy": "budget", "mixture": [0, 0]},
    ],
)
def test_a_plan_comes_back_from_its_columns(keys: dict[str, object]) -> None:
    plan = plan_with(preset="bf16", **keys)
    assert plan_at(columns_of([plan]), 0, precision={"preset": "bf16"}) == plan


@given(request=requests(), data=st.data())
@settings(max_examples=15)
def test_any_candidate_comes_back_from_its_columns(request: Request, data: st.DataObject) -> None:
    columns = legal_plans(request)
    if not len(columns):
        return
    row = data.draw(st.integers(0, len(columns) - 1))
    alone = columns_of([plan_at(columns, row, precision={"preset": "bf16"})])
    assert _rows(alone) == _rows(columns.take([row]))


@given(request=requests(), data=st.data())
@settings(max_examples=12)
def test_one_plan_alone_costs_what_it_costs_among_many(request: Request, data: st.DataObject) -> None:
    columns = legal_plans(request)
    if not len(columns):
        return
    row = data.draw(st.integers(0, len(columns) - 1))
    many, alone = estimate_columns(request, columns), estimate_columns(request, columns.take([row]))
    for term, values in many.memory.terms.items():
        assert one(alone.memory.terms[term]) == values[row], term
    for step_term, seconds in many.time.terms.items():
        assert one(alone.time.terms[step_term]) == seconds[row], step_term
    assert one(alone.memory.at) == many.memory.at[row]
    assert one(alone.memory.place) == many.memory.place[row]
    assert one(alone.time.mfu) == many.time.mfu[row]
    by_name = {(r.axis, r.collective, r.phase): r for r in alone.traffic.rows}
    for entry in many.traffic.rows:
        if entry.bytes[row]:  # modes beyond 1-D have rows only where a plan of the table uses them
            assert one(by_name[entry.axis, entry.collective, entry.phase].bytes) == entry.bytes[row]


def test_context_ranks_share_one_copy_of_the_states() -> None:
    columns = columns_with({"dp_shard": 4, "cp": 2, "zero": 1}, {"dp_replicate": 4, "cp": 2}, {"cp": 2, "zero": 3})
    assert columns.shards.tolist() == [8, 1, 2]


def test_tensor_ranks_hold_full_experts_or_shards_of_them() -> None:
    columns = columns_with(
        {"dp_shard": 4, "tp": 2, "ep": 4, "zero": 1},
        {"dp_shard": 4, "tp": 2, "ep": 4, "zero": 1, "tensor": "width"},
        {"dp_shard": 8, "tp": 2, "ep": 4, "zero": 1, "tensor": "width"},
        {"tp": 4, "ep": 2},
        {"dp_shard": 2, "tp": 4, "zero": 1},
    )
    assert columns.expert_tp.tolist() == [1, 2, 2, 1, 4]
    assert columns.edp.tolist() == [2, 1, 2, 2, 2]
    assert columns.expert_shards.tolist() == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize(("dp_shard", "cp", "tp"), [(8, 1, 1), (4, 2, 1), (2, 1, 4), (1, 2, 4), (2, 2, 2)])
def test_the_ranks_together_hold_every_expert_once(dp_shard: int, cp: int, tp: int, ep: int) -> None:
    columns = columns_with({"dp_shard": dp_shard, "cp": cp, "tp": tp, "ep": ep, "zero": 1})
    parts = ep * one(columns.expert_tp) * one(columns.expert_shards)
    assert parts == dp_shard * cp * tp


@pytest.mark.parametrize(("tp", "depth"), [(1, 1), (2, 1), (4, 1), (8, 2), (9, 1), (12, 1), (32, 2), (64, 4)])
def test_the_depth_of_two_and_a_half_dimensions(tp: int, depth: int) -> None:
    """As the engine's grid has it; 64 ranks are a square in 2d all the same."""
    columns = columns_with(*({"tp": tp, "mode": mode} for mode in ("2.5d", "2d", "3d", "1d")))
    assert columns.tensor_depth.tolist() == [depth, 1, 1, 1]
    assert math.isqrt(tp // depth) ** 2 == tp // depth or depth == 1


def test_a_layer_of_two_and_a_half_dimensions_holds_the_whole_matrix() -> None:
    columns = columns_with({"tp": 8, "mode": "2.5d"}, {"tp": 8, "mode": "1d"}, {"tp": 8, "mode": "3d"})
    assert columns.matrix_divisor.tolist() == [4, 8, 8]


def test_equal_pipelines_are_worked_out_once() -> None:
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=64, sequence_length=512)
    columns = legal_plans(request)
    unique, inverse = columns.pipelines
    assert len(unique) < len(columns) / 10
    parts = (columns.schedule, columns.pp, columns.virtual_stages, columns.microbatches)
    for index, (s, *sizes) in zip(inverse, zip(*(part.tolist() for part in parts), strict=True), strict=True):
        assert unique[index] == (SCHEDULES[s], *sizes, ())


def test_no_two_pipelines_are_taken_for_one() -> None:
    """They are told apart by one packed number: fields that ran into each other would mix their schedules up."""
    sizes = product((1, 2, 3, 128), (1, 2, 4, 8), (1, 2, 16, 32, 48, 1024, 2**20))
    keys = [{"schedule": "looped_bfs", "pp": pp, "virtual_stages": v, "microbatches": m} for pp, v, m in sizes]
    unique, inverse = columns_with(*keys).pipelines
    assert len(unique) == len(keys)
    assert sorted(inverse.tolist()) == list(range(len(keys)))


def test_what_a_person_dealt_is_a_pipeline_of_its_own() -> None:
    keys = {"pp": 2, "microbatches": 4}
    columns = columns_with(keys, {**keys, "blocks": [3, 1]}, {**keys, "blocks": [1, 3]}, {**keys, "blocks": [3, 1]})
    for taken, partitions in ((columns, [(), (3, 1), (1, 3), (3, 1)]), (columns.take([3, 0]), [(3, 1), ()])):
        unique, inverse = taken.pipelines
        assert [unique[index].stage_blocks for index in inverse] == partitions
        assert len(unique) == len(set(partitions))


def _rows(columns: Columns) -> dict[str, list[int]]:
    return {name: getattr(columns, name).tolist() for name in array_names()}
