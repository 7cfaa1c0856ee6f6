"""The smallest changes: each fits by the planner's own estimate, is legal, built, and changes the named keys only."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_cases import GIB, plan_with, request_of, requests, tiny_llama

from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.core.terms import MemoryTerm
from weft.plan.ask import require_planned
from weft.plan.changes import (
    Change,
    fewest_devices,
    format_keys,
    largest_saving,
    saving_of,
    smallest_changes,
    with_keys,
)
from weft.plan.estimate import estimate
from weft.plan.request import Request


def flat(plan: Plan) -> dict[str, Any]:
    tables = plan.model_dump(mode="json")
    return {f"{section}.{key}": value for section in tables if section != "version"
            for key, value in tables[section].items()}  # fmt: skip


def run_keys(request: Request) -> dict[str, Any]:
    workload = request.workload
    return {
        "train.optimizer": workload.optimizer,
        "train.optimizer_kernel": workload.optimizer_kernel,
        "train.global_batch": workload.global_batch,
    }


def differing(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in before if before[key] != after[key]}


def require_sound(request: Request, plan: Plan, change: Change, budget_bytes: float, *, trained: bool) -> None:
    """What every change promises."""
    changed_request, changed = with_keys(request, plan, change.keys)
    if trained:
        require_executable(changed)
    require_planned(changed_request, changed)
    assert differing(flat(plan), flat(changed)) | differing(run_keys(request), run_keys(changed_request)) == set(
        change.keys
    )
    found = estimate(changed_request, changed)
    assert found.memory_bytes == pytest.approx(change.memory_bytes, abs=64)
    assert found.step_s == pytest.approx(change.step_s)
    assert change.memory_bytes <= budget_bytes
    assert change.saves_bytes == pytest.approx(estimate(request, plan).memory_bytes - found.memory_bytes, abs=64)


@pytest.mark.extended
@settings(max_examples=40)
@given(requests(), st.sampled_from([0, 1, 2, 3]), st.sampled_from([0.2, 0.5, 0.8, 0.99]), st.booleans())
def test_each_change_fits_and_changes_the_named_keys_only(
    request: Request, zero: int, share: float, trained: bool
) -> None:
    devices = request.cluster.num_devices
    assume(request.workload.global_batch % devices == 0)
    axis = "dp_shard" if zero and devices > 1 else "dp_replicate"
    preset = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[request.precision.weights]
    plan = plan_with(**{axis: devices}, zero=zero if axis == "dp_shard" else 0, preset=preset)
    budget = round(share * estimate(request, plan).memory_bytes)
    found = smallest_changes(request, plan, budget_bytes=budget, trained_only=trained, top=10)
    for change in found:
        require_sound(request, plan, change, budget, trained=trained)
    assert len({frozenset(change.keys) for change in found}) == len(found)  # one value for each set of keys


def test_the_least_slowdown_goes_first() -> None:
    request = request_of(global_batch=64)
    found = smallest_changes(request, plan_with(dp_shard=8, zero=3, preset="bf16"), top=5)
    assert [change.step_s for change in found] == sorted(change.step_s for change in found)
    assert next(iter(found[0].keys)) == "pipeline.microbatches"  # the sharded 8B keeps its speed when cut in pieces
    assert found[0].text.startswith(f"pipeline.microbatches = {found[0].keys['pipeline.microbatches']}: ")
    assert found[0].text.endswith(("slower", "faster", "as fast"))


def test_replicas_become_shards() -> None:
    request = request_of(devices="8xH200", sequence_length=8192)
    (change,) = smallest_changes(request, plan_with(dp_replicate=8, preset="bf16"), top=1)
    assert change.keys == {"data_parallel.zero": 1, "mesh.dp_replicate": 1, "mesh.dp_shard": 8}


def test_pairs_only_where_no_single_key_suffices() -> None:
    request = request_of(global_batch=64, sequence_length=8192)
    plan = plan_with(dp_shard=8, zero=3, preset="bf16")
    best = largest_saving(request, plan)
    assert best is not None
    singles = smallest_changes(request, plan, budget_bytes=best.memory_bytes, top=20)
    pairs = smallest_changes(request, plan, budget_bytes=best.memory_bytes - 1, top=20)
    assert [change.keys for change in singles] == [best.keys]
    assert {len(set(change.keys) - {"activations.mixture"}) for change in pairs} == {2}


def test_only_the_blocks_that_are_too_many_are_computed_again() -> None:
    """Selective recompute of all is 10 GiB too much; full of all would take 30% longer."""
    request = request_of(global_batch=16, sequence_length=8192)
    plan = plan_with(dp_shard=8, zero=3, preset="bf16", microbatches=2)
    whole = replace(request, workload=replace(request.workload, global_batch=32))
    (change,) = (one for one in smallest_changes(whole, plan, top=9) if "activations.policy" in one.keys)
    assert change.keys == {"activations.policy": "budget", "activations.mixture": change.keys["activations.mixture"]}
    require_sound(whole, plan, change, whole.budget_bytes, trained=True)
    full = estimate(whole, plan_with(dp_shard=8, zero=3, preset="bf16", microbatches=2, policy="full"))
    assert change.step_s < 0.9 * full.step_s
    settled_plan = with_keys(whole, plan, change.keys)[1]
    (more,) = (
        one
        for one in smallest_changes(whole, settled_plan, budget_bytes=round(0.8 * change.memory_bytes), top=9)
        if "activations.mixture" in one.keys
    )
    assert set(more.keys) == {"activations.mixture"}


def test_more_devices_are_the_last_resort() -> None:
    request = request_of("llama-3-70b", "8xA100-40GB", sequence_length=2048)
    plan = plan_with(dp_shard=8, zero=3, preset="bf16", policy="full")
    first = smallest_changes(request, plan)[0]
    assert first.keys["train.global_batch"] == first.keys["mesh.dp_shard"]  # a sequence a device, as before
    assert first.keys["mesh.dp_shard"] <= fewest_devices(request, plan)  # one more key may need fewer


def test_offload_is_offered() -> None:
    request, plan = request_of("llama-3-8b", "1xH200", global_batch=1), plan_with(preset="bf16")
    said = {key for change in smallest_changes(request, plan, top=9) for key in change.keys}
    asked = {key for change in smallest_changes(request, plan, trained_only=False, top=9) for key in change.keys}
    assert "offload.optimizer" in said
    assert said <= asked


def test_a_kernel_of_its_own_goes_with_the_optimizer() -> None:
    request = request_of("llama-3-8b", "1xH200", global_batch=1, optimizer_kernel="foreach")
    keys = [change.keys for change in smallest_changes(request, plan_with(preset="bf16"), top=9)]
    assert {"train.optimizer": "adamw8bit", "train.optimizer_kernel": "auto"} in keys


def test_bf16_halves_what_fp32_keeps() -> None:
    request, plan = request_of(tiny_llama(), "1xH200", preset="fp32"), plan_with(preset="fp32")
    needs = estimate(request, plan).memory_bytes
    keys = [change.keys for change in smallest_changes(request, plan, budget_bytes=needs - 1, top=9)]
    assert {"precision.preset": "bf16"} in keys


def test_nothing_helps_where_nothing_is_enough() -> None:
    request = request_of("llama-3-8b", "1xT4", global_batch=1, sequence_length=131072)
    plan = plan_with(preset="bf16")
    assert smallest_changes(request, plan, budget_bytes=GIB // 8) == []
    assert fewest_devices(replace(request, memory_share=0.01), plan) == 0


def test_the_largest_saving_is_the_largest() -> None:
    request, plan = request_of(global_batch=64), plan_with(dp_shard=8, zero=3, preset="bf16")
    best = largest_saving(request, plan)
    assert best is not None
    assert all(best.saves_bytes >= change.saves_bytes for change in smallest_changes(request, plan, top=20))
    require_sound(request, plan, best, float("inf"), trained=True)


def test_keys_are_said_as_the_files_have_them() -> None:
    assert format_keys({"pipeline.microbatches": 4, "activations.policy": "full"}) == (
        "pipeline.microbatches = 4, activations.policy = 'full'"
    )


def test_what_no_rule_allows_is_not_offered() -> None:
    request, plan = request_of("llama-3-8b", "1xH200", global_batch=1), plan_with(preset="bf16")
    without_host = replace(request, cluster=replace(request.cluster, host_memory_bytes=0))
    needs = estimate(request, plan).memory_bytes
    for asked, is_offered in ((request, True), (without_host, False)):
        found = smallest_changes(asked, plan, budget_bytes=needs, trained_only=False, top=9)
        assert any("offload.optimizer" in change.keys for change in found) == is_offered
    saving = largest_saving(without_host, plan, trained_only=False)
    assert saving is not None
    assert "offload.optimizer" not in saving.keys


AT_PEAK = st.dictionaries(st.sampled_from([str(term) for term in MemoryTerm]), st.integers(0, 2**36))


@settings(max_examples=12)
@given(requests(), st.sampled_from([1, 2, 8]), AT_PEAK)
def test_nothing_saves_more_than_a_dry_run_found(request: Request, replicas: int, at_peak: dict[str, int]) -> None:
    """No term can be saved that the dry run has not, and none beyond what is there, whatever the estimate believes."""
    replicas = gcd(replicas, request.cluster.num_devices)
    shards = request.cluster.num_devices // replicas
    plan = plan_with(dp_replicate=replicas, dp_shard=shards, zero=3 if shards > 1 else 0)
    inside = sum(size for term, size in at_peak.items() if term != MemoryTerm.FRAMEWORK)
    saving = largest_saving(request, plan, trained_only=False, at_peak=at_peak)
    assert saving is None or 0 < saving.saves_bytes <= inside
    for change in smallest_changes(request, plan, trained_only=False, top=9):
        assert saving_of(request, plan, change, at_peak=at_peak).saves_bytes <= inside


def test_a_communicator_less_is_no_saving_of_the_allocator_s_peak() -> None:
    """A tiny model on replicas of shards: sharding over all ranks saves a communicator, 400 MiB that no peak has."""
    request = request_of(tiny_llama(), "4xH100-80GB", global_batch=4, sequence_length=64)
    plan = plan_with(dp_replicate=2, dp_shard=2, zero=3, preset="bf16")
    believed = largest_saving(request, plan)
    assert believed is not None
    assert believed.saves_bytes > 380 * 2**20
    at_peak = {"weights": 12 * 2**20, "optimizer_state": 24 * 2**20, "activations": 29 * 2**20}
    saving = largest_saving(request, plan, at_peak=at_peak)
    assert saving is not None
    assert 0 < saving.saves_bytes <= 65 * 2**20


def test_where_the_dry_run_agrees_a_saving_is_the_estimate_s_own() -> None:
    request, plan = request_of(global_batch=16), plan_with(dp_shard=8, zero=3, preset="bf16")
    terms = estimate(request, plan).memory_terms
    inside = {term: size for term, size in terms.items() if term != MemoryTerm.FRAMEWORK}
    best = largest_saving(request, plan, at_peak=inside)
    assert best is not None
    after = estimate(*with_keys(request, plan, best.keys)).memory_terms
    expected = sum(inside.values()) - sum(size for term, size in after.items() if term != MemoryTerm.FRAMEWORK)
    assert best.saves_bytes == pytest.approx(expected, rel=1e-3)
