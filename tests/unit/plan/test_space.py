"""Every plan worth asking about: nothing twice, nothing missing, and what the user fixed is fixed."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from plan_cases import columns_with, legal_plans, request_of, requests, tiny_llama, tiny_mixtral

from weft.core.plan import Plan
from weft.plan.columns import Columns, array_names
from weft.plan.plan_rows import plan_at
from weft.plan.request import Request
from weft.plan.resolve import with_choices
from weft.plan.rules import check_plan
from weft.plan.space import Freedom, enumerate_plans

LLAMA = request_of(tiny_llama(), "8xH100-80GB", global_batch=64, sequence_length=8192)
MOE = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=64, sequence_length=2048)


def table(columns: Columns) -> np.ndarray[Any, Any]:
    return np.stack([getattr(columns, name) for name in array_names()], axis=1)


@given(request=requests())
@settings(max_examples=20)
def test_every_candidate_fills_the_cluster_and_none_comes_twice(request: Request) -> None:
    columns = enumerate_plans(request, Freedom())
    assert (columns.num_ranks == request.cluster.num_devices).all()
    assert len(np.unique(table(columns), axis=0)) == len(columns)


def test_every_legal_mesh_of_a_dense_model_is_there() -> None:
    """By brute force over the degrees, replicas and shards apart: 8 = dp x cp x tp x pp."""
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "zero")
    columns = legal_plans(LLAMA)
    found = set(zip(*(getattr(columns, axis).tolist() for axis in axes), strict=True))
    for dp, cp, tp, pp in product((1, 2, 4, 8), (1, 2), (1, 2, 4, 8), (1, 2, 4, 8)):
        if dp * cp * tp * pp != 8:
            continue
        plan: dict[str, Any] = {"dp_shard": dp, "cp": cp, "tp": tp, "pp": pp, "microbatches": 64 // dp}
        for zero in (1, 2, 3) if dp * cp > 1 else (0,):
            if not check_plan(LLAMA, columns_with({**plan, "zero": zero})):
                assert (1, dp, cp, tp, pp, zero) in found
        replicated = {"dp_replicate": dp, "cp": cp, "tp": tp, "pp": pp, "microbatches": 64 // dp}
        if not check_plan(LLAMA, columns_with(replicated)):
            assert (dp, 1, cp, tp, pp, 0) in found


def test_every_expert_degree_is_there() -> None:
    assert set(np.unique(legal_plans(MOE).ep).tolist()) == {1, 2, 4, 8}
    assert set(np.unique(legal_plans(LLAMA).ep).tolist()) == {1}


def test_hybrid_sharding_fills_nodes() -> None:
    request = request_of("llama-3-8b", "4x8xH100-80GB", global_batch=64, sequence_length=4096)
    columns = legal_plans(request)
    pairs = set(zip(columns.dp_replicate.tolist(), columns.dp_shard.tolist(), strict=True))
    assert {(1, 32), (32, 1), (4, 8)} <= pairs


def test_micro_batches_are_powers_of_two_of_a_rank_s_rows() -> None:
    rows = 64 // legal_plans(LLAMA).dp
    sizes = rows // legal_plans(LLAMA).microbatches
    assert set(np.unique(sizes).tolist()) <= {1, 2, 4, 8, 16, 32, 64}
    assert 1 in sizes


def test_asynchronous_schedules_come_only_when_asked_for() -> None:
    assert not legal_plans(LLAMA).named("pipedream").any()
    asked = legal_plans(LLAMA, Freedom(fixed={"pipeline.schedule": "pipedream"}))
    assert asked.named("pipedream")[asked.pp > 1].all()
    assert (asked.pp > 1).any()


FIXED: list[tuple[str, Any]] = [
    ("mesh.tp", 2),
    ("mesh.pp", 2),
    ("mesh.cp", 2),
    ("mesh.dp_replicate", 2),
    ("mesh.dp_shard", 2),
    ("mesh.dp_shard", 4),
    ("data_parallel.zero", 0),
    ("data_parallel.zero", 2),
    ("tensor_parallel.mode", "3d"),
    ("tensor_parallel.sequence_parallel", False),
    ("tensor_parallel.loss_parallel", False),
    ("pipeline.schedule", "zbv"),
    ("pipeline.microbatches", 4),
    ("pipeline.virtual_stages", 2),
    ("activations.policy", "full"),
    ("activations.offload", "cpu"),
    ("offload.optimizer", "cpu"),
    ("offload.parameters", "cpu"),
    ("offload.update", "host"),
    ("offload.durable", "step"),
    ("compile.enabled", True),
]


@pytest.mark.parametrize(("key", "value"), FIXED)
def test_what_is_fixed_is_so_in_every_candidate(key: str, value: Any) -> None:
    """A plan without a pipeline has no schedule to fix: those keep the default."""
    columns = legal_plans(LLAMA, Freedom(fixed={key: value}))
    assert len(columns)
    free_without_pipeline = key in ("pipeline.schedule", "pipeline.virtual_stages")
    rows = np.flatnonzero(columns.pp > 1) if free_without_pipeline else np.arange(len(columns))
    assert len(rows)
    for row in rows[:: max(1, len(rows) // 50)]:
        assert _at(plan_at(columns, int(row), precision={}), key) == value


def test_a_fixed_shard_degree_leaves_every_other_degree_free() -> None:
    """On 8 devices dp_shard = 2 goes with 4 replicas, 2 replicas and tp 2, tp 4, …: none of them may be missing."""
    columns = legal_plans(LLAMA, Freedom(fixed={"mesh.dp_shard": 2}))
    replicas = {int(count) for count in np.unique(columns.dp_replicate)}
    assert replicas == {1, 2, 4}


def test_fixing_everything_leaves_one_plan() -> None:
    keys = {
        "mesh.tp": 2, "mesh.pp": 2, "mesh.cp": 1, "mesh.dp_shard": 2, "mesh.dp_replicate": 1, "mesh.ep": 1,
        "data_parallel.zero": 1, "tensor_parallel.mode": "1d", "pipeline.schedule": "1f1b",
        "pipeline.microbatches": 8, "activations.policy": "full",
    }  # fmt: skip
    assert len(legal_plans(LLAMA, Freedom(fixed=keys))) == 1


def test_an_impossible_wish_leaves_nothing() -> None:
    assert len(enumerate_plans(LLAMA, Freedom(fixed={"mesh.dp_replicate": 3}))) == 0


def _at(plan: Plan, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(plan, section), name)


def test_the_search_and_training_resolve_open_choices_alike() -> None:
    """plan.resolve over columns: a plan found means the same to every verb. Dropout only the model knows."""
    for freedom in (Freedom(), Freedom(fixed={"compile.enabled": False}), Freedom(fixed={"kernels.loss": "whole"})):
        columns = legal_plans(LLAMA, freedom)
        for row in np.random.default_rng(0).choice(len(columns), size=150, replace=False):
            plan = plan_at(columns, int(row), precision={"preset": "bf16"})
            tables = plan.model_dump(mode="json", exclude_none=True, exclude={"compile": True, "kernels": True})
            for key, value in freedom.fixed.items():
                section, name = key.split(".")
                tables[section] = {name: value}
            assert with_choices(tables, on_gpu=True) == plan


def test_blocks_are_compiled_by_themselves_on_gpus_and_without_dropout() -> None:
    assert legal_plans(LLAMA).compiled.any()
    on_cpu = request_of(tiny_llama(), "8xCPU", global_batch=64, sequence_length=512, preset="fp32")
    assert not legal_plans(on_cpu).compiled.any()
    assert not legal_plans(on_cpu).fused_loss.any()
    dropping = tiny_llama(attention_dropout=0.1)
    assert not legal_plans(request_of(dropping, "8xH100-80GB", global_batch=64)).compiled.any()
