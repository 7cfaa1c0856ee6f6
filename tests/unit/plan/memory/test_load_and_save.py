"""What a run needs beside its steps: on the host for offload, on the device to load and to resume."""

from __future__ import annotations

from dataclasses import replace

from plan_cases import one, request_of

from weft.core.plan import Plan
from weft.core.terms import MemoryTerm
from weft.plan.columns import Columns
from weft.plan.estimate import fitting
from weft.plan.memory.load_and_save import moments_of
from weft.plan.memory.peak import estimate_memory
from weft.plan.plan_rows import columns_of
from weft.plan.view import views_of

LLAMA_8B = 8_030_261_248
SHARDED = {"mesh": {"dp_shard": 8}, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}}


def test_resuming_holds_weights_states_and_gradients() -> None:
    found = moments_of(request_of(), Plan.from_tables(SHARDED))
    assert found["resuming_bytes"] == LLAMA_8B // 8 * (4 + 8 + 4)
    assert found["saving_host_bytes_per_node"] == LLAMA_8B * (4 + 8)
    table = 128256 * 4096  # the largest tensor that is cut up
    assert found["loading_bytes"] == (LLAMA_8B // 8 + table) * 4


def test_sizes_follow_the_precision() -> None:
    low = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16"}
    plan = Plan.from_tables({**SHARDED, "precision": low})
    found = moments_of(replace(request_of(), precision=plan.precision.policy()), plan)
    assert found["resuming_bytes"] == LLAMA_8B // 8 * (2 + 4 + 2)
    assert found["saving_host_bytes_per_node"] == LLAMA_8B * (2 + 4)


def offloaded(**tables: object) -> Columns:
    return columns_of([Plan.from_tables({**SHARDED, "offload": {"optimizer": "cpu"}, **tables})])


def test_an_offloaded_optimizer_fills_the_host() -> None:
    found = estimate_memory(views_of(request_of(), offloaded()))
    assert one(found.host) == LLAMA_8B * 8
    assert one(found.terms[MemoryTerm.OPTIMIZER_STATE]) < LLAMA_8B // 8
    assert one(estimate_memory(views_of(request_of(), columns_of([Plan.from_tables(SHARDED)]))).host) == 0


def test_offloaded_states_do_not_pass_through_the_device() -> None:
    plan = Plan.from_tables({**SHARDED, "offload": {"optimizer": "cpu"}})
    found = moments_of(request_of(), plan)
    assert found["resuming_bytes"] == LLAMA_8B // 8 * (4 + 4)
    assert found["loading_bytes"] == LLAMA_8B // 8 * 4 + 128256 * 4096 * 4


def test_a_host_that_is_too_small_refuses_it() -> None:
    request, columns = request_of(sequence_length=1024), offloaded(activations={"policy": "full"})
    assert one(fitting(request, estimate_memory(views_of(request, columns)))) == 1
    # 64.2 GB of moments: a host of 71 GB leaves a tenth to the system and the processes
    small = replace(request, cluster=replace(request.cluster, host_memory_bytes=71 * 10**9))
    assert one(fitting(small, estimate_memory(views_of(small, columns)))) == 0
