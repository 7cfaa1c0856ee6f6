"""The search: what it offers is legal and adds up, its order is the stated one, its counts account for everything."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from plan_cases import request_of, requests, tiny_llama, tiny_mixtral

from weft.core.plan import Plan
from weft.core.plan_checks import check_consistent
from weft.plan.estimate import Estimate, estimate
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.rules import check_plan
from weft.plan.search import DOES_NOT_FIT, TIE, Answer, complexity, search
from weft.plan.space import Freedom
from weft.plan.trained import best_trained, built, why_not_trained

BF16 = {"preset": "bf16"}
LLAMA_8B = request_of(global_batch=64, sequence_length=8192)
ANSWER = search(LLAMA_8B, precision=BF16, top=8)


def layout(plan: Plan) -> tuple[Any, ...]:
    return (*plan.mesh.sizes().values(), plan.mesh.ep, plan.data_parallel.zero, plan.tensor_parallel.mode)


def accounted(answer: Answer) -> None:
    """Every candidate is refused by a rule, too large, or fits; those that no rule refused were estimated."""
    too_large = answer.rejected.get(DOES_NOT_FIT, 0)
    assert answer.considered == sum(answer.rejected.values()) + answer.num_fitting
    assert answer.estimated == too_large + answer.num_fitting
    assert answer.considered == sum(answer.rejected.values()) - too_large + answer.estimated


def sound(request: Request, found: Estimate) -> None:
    assert check_plan(request, columns_of([found.plan])) == []
    assert check_consistent(found.plan) == []
    assert found.plan.num_ranks == request.cluster.num_devices
    assert found.memory_bytes == sum(found.memory_terms.values())
    assert found.step_s == pytest.approx(sum(found.time_terms.values()))
    assert all(value >= 0 for value in (*found.memory_terms.values(), *found.time_terms.values()))
    assert math.isfinite(found.step_s)
    assert 0 < found.mfu < 1
    assert not found.fits or found.memory_bytes <= request.budget_bytes


@given(request=requests())
@settings(max_examples=12)
def test_whatever_is_offered_is_legal_adds_up_and_is_accounted_for(request: Request) -> None:
    answer = search(request, precision=BF16)
    accounted(answer)
    for found in (*answer.plans, *answer.pareto):
        sound(request, found)
    assert len({layout(found.plan) for found in answer.plans}) == len(answer.plans)
    assert bool(answer.num_fitting) == any(found.fits for found in answer.plans)


def test_an_offered_plan_costs_what_the_plan_costs_alone() -> None:
    for found in ANSWER.plans:
        assert estimate(LLAMA_8B, found.plan) == found


def test_all_that_is_offered_fits_when_something_does() -> None:
    assert ANSWER.num_fitting > 8
    assert len(ANSWER.plans) == 8
    assert all(found.fits for found in ANSWER.plans)


def test_fastest_first_and_the_simpler_of_two_that_tie() -> None:
    """Steps of TIE above the fastest of all; within one step the simpler plan leads."""
    fastest = min(found.step_s for found in (*ANSWER.plans, *ANSWER.pareto))
    keys = [
        (math.floor(math.log(found.step_s / fastest) / TIE), float(complexity(columns_of([found.plan]))[0]))
        for found in ANSWER.plans
    ]
    assert keys == sorted(keys)
    assert ANSWER.plans[0].step_s <= fastest * math.exp(TIE)


def test_one_plan_of_each_layout() -> None:
    assert len({layout(found.plan) for found in ANSWER.plans}) == len(ANSWER.plans)


def test_a_longer_list_begins_with_the_shorter_one() -> None:
    assert [found.plan for found in search(LLAMA_8B, precision=BF16, top=3).plans] == [
        found.plan for found in ANSWER.plans[:3]
    ]


def test_the_same_question_has_the_same_answer() -> None:
    again = search(LLAMA_8B, precision=BF16, top=8)
    assert again.plans == ANSWER.plans
    assert again.pareto == ANSWER.pareto
    assert again.rejected == ANSWER.rejected


def test_the_pareto_front_trades_time_for_memory() -> None:
    """Fastest first, each smaller than the one before; its head is the fastest plan of all."""
    times = [found.step_s for found in ANSWER.pareto]
    sizes = [found.memory_bytes for found in ANSWER.pareto]
    assert len(times) > 1
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert times[0] <= min(found.step_s for found in ANSWER.plans)
    for found in ANSWER.plans:
        assert not any(
            other.step_s < found.step_s * (1 - 1e-9) and other.memory_bytes < found.memory_bytes
            for other in ANSWER.plans
            if other is not found and found in ANSWER.pareto
        )


def test_the_precision_asked_for_is_written_into_the_plans() -> None:
    assert {found.plan.precision.preset for found in ANSWER.plans} == {"bf16"}


def test_a_model_that_fits_on_one_device_is_replicated() -> None:
    """The rule of thumb: no sharding, no recomputation where there is room."""
    answer = search(request_of("gpt2", global_batch=256, sequence_length=1024), precision=BF16)
    best = answer.plans[0].plan
    assert (best.mesh.dp_replicate, best.data_parallel.zero, best.activations.policy) == (8, 0, "none")


def test_a_model_that_does_not_is_sharded() -> None:
    best = ANSWER.plans[0].plan
    assert best.mesh.dp_shard > 1
    assert best.data_parallel.zero > 0


@pytest.mark.parametrize(
    "fixed",
    [
        {"mesh.tp": 4},
        {"mesh.pp": 2, "pipeline.schedule": "1f1b"},
        {"data_parallel.zero": 3, "activations.policy": "full"},
        {"mesh.dp_shard": 2, "mesh.tp": 2},
        {"pipeline.microbatches": 8, "compile.enabled": True},
    ],
)
def test_what_is_fixed_is_in_every_plan_offered(fixed: dict[str, Any]) -> None:
    answer = search(LLAMA_8B, freedom=Freedom(fixed=fixed), precision=BF16)
    accounted(answer)
    assert answer.plans
    for found in answer.plans:
        tables = found.plan.model_dump()
        for key, value in fixed.items():
            section, _, name = key.partition(".")
            assert tables[section][name] == value


def test_a_contradictory_wish_gets_its_reasons_and_no_plan() -> None:
    """8B's 32 heads do not divide over 3, and 3 does not divide 8."""
    answer = search(LLAMA_8B, freedom=Freedom(fixed={"mesh.dp_shard": 8, "pipeline.microbatches": 3}), precision=BF16)
    assert answer.plans == []
    assert answer.estimated == 0
    assert answer.considered == sum(answer.rejected.values()) > 0


def test_offload_is_tried_where_nothing_fits_without() -> None:
    """7B with 108 GB of states on four cards of 24 GB: the host takes the moments, or it does not fit."""
    request = request_of("llama-2-7b", "4xRTX4090", global_batch=4, sequence_length=512)
    answer = search(request, precision=BF16)
    accounted(answer)
    without = search(request, freedom=Freedom(fixed={"offload.optimizer": "none"}), precision=BF16)
    assert without.num_fitting == 0
    assert answer.num_fitting > 0
    assert all(found.plan.offload.optimizer == "cpu" for found in answer.plans)
    assert answer.considered > without.considered


def test_offload_needs_room_on_the_host() -> None:
    """The same cards beside a host of 8 GB: its memory is asked too."""
    request = request_of("llama-2-7b", "4xRTX4090", global_batch=4, sequence_length=512)
    fitting = search(request, precision=BF16)
    small = search(replace(request, cluster=replace(request.cluster, host_memory_bytes=8 * 10**9)), precision=BF16)
    accounted(small)
    assert fitting.num_fitting > 0
    assert small.num_fitting == 0


def test_nothing_fits_and_the_smallest_is_named() -> None:
    """405B on one node: plans are listed smallest first, and the smallest of all is told."""
    answer = search(request_of("llama-3.1-405b", global_batch=8, sequence_length=8192), precision=BF16)
    accounted(answer)
    assert answer.num_fitting == 0
    assert not any(found.fits for found in answer.plans)
    sizes = [found.memory_bytes for found in answer.plans]
    assert sizes == sorted(sizes)
    assert answer.smallest is not None
    assert answer.smallest.memory_bytes <= min(sizes)
    assert answer.smallest.plan.activations.policy == "full"
    assert answer.smallest.plan.offload.optimizer == "cpu"  # of both searches, without and with offload
    assert answer.pareto == []


def test_more_memory_never_makes_the_best_plan_slower() -> None:
    shape = tiny_llama(num_hidden_layers=32, hidden_size=4096, intermediate_size=14_336, vocab_size=128_256)
    small, large = (
        search(request_of(shape, devices, global_batch=64, sequence_length=4096), precision=BF16).plans[0]
        for devices in ("8xA100-40GB", "8xA100-80GB")
    )
    assert large.step_s <= small.step_s * math.exp(TIE)


def test_a_search_of_trainable_plans_offers_expert_parallelism() -> None:
    request = request_of("qwen3-30b-a3b", "8xH100-80GB", global_batch=64, sequence_length=4096)
    freedom = built({"mesh.ep": 4, "mesh.tp": 2})
    found = search(request, freedom=freedom, precision=BF16, top=1)
    assert "mesh.ep" not in built({}).fixed
    assert (found.plans[0].plan.mesh.ep, found.plans[0].plan.mesh.tp) == (4, 2)
    assert why_not_trained(found.plans[0]) == ""


def test_what_is_offered_instead_keeps_the_fixed_keys_that_can_be_trained() -> None:
    request = request_of(tiny_mixtral(), "8xH100-80GB", global_batch=64, sequence_length=1024)
    fixed = {
        "mesh.ep": 4,
        "mesh.cp": 2,
        "expert_parallel.chunks": 2,
        "expert_parallel.wire": "float8",
    }
    instead = best_trained(search(request, freedom=Freedom(fixed=fixed), top=1))
    assert instead is not None
    assert not why_not_trained(instead)
    exchange = instead.plan.expert_parallel
    assert (instead.plan.mesh.ep, instead.plan.mesh.cp, exchange.chunks, exchange.wire) == (4, 2, 2, "float8")
    grid = {**fixed, "tensor_parallel.mode": "2d"}  # of no plan
    assert best_trained(search(request, freedom=Freedom(fixed=grid), top=1)) is None
