"""Products in float8: their rate, the passes around them, measured steps and layers, devices without them."""

from dataclasses import replace
from typing import Any

import pytest
from benchmark_folder import benchmarks_importable
from plan_cases import columns_with, one, plan_with, request_of, tiny_mixtral, view_with

from weft.core.errors import PlanError
from weft.core.terms import StepTerm
from weft.plan.ask import ask, estimate_plan, require_planned, search_plans
from weft.plan.estimate import Estimate, estimate
from weft.plan.request import Request
from weft.plan.time.compute import BlockSeconds, block_seconds, linear_s
from weft.plan.time.float8 import quantise_bytes
from weft.plan.trained import best_trained, built, why_not_trained
from weft.plan.why import why_best

with benchmarks_importable():
    import gpu_cases

REQUEST = request_of("llama-3-8b", "8xH200", global_batch=16, sequence_length=8192)
SHARDED: dict[str, Any] = {"dp_shard": 8, "zero": 2, "enabled": True}


def busy(request: Request = REQUEST, **plan: Any) -> BlockSeconds:
    return block_seconds(view_with(request, **{**SHARDED, **plan}))


def compute_s(found: Estimate) -> float:
    """Without the wire: the measured rank's collectives were copies in its own memory."""
    return found.step_s - sum(value for term, value in found.time_terms.items() if "communication" in term)


def measured_case(name: str, **float8: str) -> Estimate:
    group = next(one for one in gpu_cases.GROUPS if one.name == name)
    case = group.case("weft")
    tables = {**gpu_cases.plan_tables(case, tiny=False), **({"float8": float8} if float8 else {})}
    from weft.core.plan import Plan
    from weft.core.run_spec import RunSpec

    plan = Plan.from_tables(tables)
    return estimate_plan(
        RunSpec.from_tables(gpu_cases.run_tables(group, case, tiny=False)), plan, f"{plan.num_ranks}xH200"
    )


# benchmarks/results/gpu_step-2026-11-16-h200.md
def test_the_measured_steps_of_8b_in_bf16_and_in_float8_are_foreseen() -> None:
    plain, short = (compute_s(measured_case(f"8b-fake8-{name}")) for name in ("bf16", "float8"))
    assert plain == pytest.approx(1.449, rel=0.05)
    assert short == pytest.approx(1.064, rel=0.05)
    assert plain / short == pytest.approx(1.449 / 1.064, rel=0.03)


def test_a_smaller_model_gains_less() -> None:
    """1B on one GPU, float8 in its MLPs: measured 1.11 times the tokens/s of bf16."""
    plain, short = (compute_s(measured_case("1b-single", **keys)) for keys in ({}, {"linears": "auto"}))
    assert plain / short == pytest.approx(1.11, rel=0.10)


# benchmarks/results/float8_layers-2026-11-17-h200.md: ms of forward and backward, 16,384 rows
LAYERS = {
    (2048, 8192): (4.283, 1.670),
    (8192, 2048): (4.277, 1.644),
    (4096, 4096): (3.703, 1.481),
    (4096, 14_336): (9.834, 4.728),
    (14_336, 4096): (9.949, 4.645),
    (8192, 28_672): (29.531, 18.944),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("sizes", LAYERS)
def test_measured_layers_are_foreseen(sizes: tuple[int, int], is_compiled: bool) -> None:
    device = REQUEST.cluster.device
    bandwidth = device.memory_bytes_per_s * device.memory_share
    rows, (inner, outer) = REQUEST.workload.tokens / 8, sizes
    columns = columns_with({"enabled": is_compiled, "linears": "all"})
    product = linear_s(device, REQUEST, rows=rows, inner=inner, outer=outer, in_float8=True)  # type: ignore[arg-type]
    passes = quantise_bytes(columns, rows=rows, inner=inner, outer=outer)  # type: ignore[arg-type]
    found_ms = 1e3 * (3 * float(product) + one(passes.forward + passes.backward) / bandwidth)
    assert found_ms == pytest.approx(LAYERS[sizes][is_compiled], rel=0.12)


def test_the_products_of_the_blocks_run_by_the_float8_rate_and_the_head_s_does_not() -> None:
    plain, short = busy(), busy(linears="all")
    rates = REQUEST.cluster.device
    ratio = (rates.peak_flops["float8"] * rates.rates["float8"].best) / (
        rates.peak_flops["bfloat16"] * rates.rates["bfloat16"].best
    )
    assert one(plain.matmul_forward) / one(short.matmul_forward) == pytest.approx(ratio, rel=0.02)
    assert one(short.head_forward) == one(plain.head_forward)
    assert one(short.attention_forward) == one(plain.attention_forward)
    assert one(plain.quantise_forward) == one(plain.quantise_backward) == 0 < one(short.quantise_forward)


def test_weights_that_arrive_in_float8_are_not_quantised_again() -> None:
    arriving, own = busy(linears="all"), busy(linears="all", gather="weights")
    assert one(arriving.quantise_forward) < one(own.quantise_forward)
    assert one(arriving.quantise_backward) == one(own.quantise_backward)


def test_auto_takes_fewer_layers_than_all() -> None:
    none, some, every = (busy(linears=choice) for choice in ("none", "auto", "all"))
    assert one(none.quantise_forward) < one(some.quantise_forward) < one(every.quantise_forward)
    assert one(none.matmul_forward) > one(some.matmul_forward) > one(every.matmul_forward)


def test_layers_of_no_such_size_cost_what_they_cost() -> None:
    small = request_of("gpt2", "1xH200", global_batch=8, sequence_length=1024)
    plain, asked = (estimate(small, plan_with(linears=choice)).step_s for choice in ("none", "auto"))
    assert asked == plain


def test_full_recomputation_quantises_again() -> None:
    found = busy(linears="all", policy="full")
    again = found.matmul_forward + found.quantise_forward + found.attention_forward + found.pointwise_forward
    assert one(found.recompute) == pytest.approx(one(again))


def test_emulated_recipes_cost_more_than_bfloat16() -> None:
    plain, emulated = busy(), busy(linears="all", recipe="nvfp4", gather="weights")
    assert one(emulated.matmul_forward) > 5 * one(plain.matmul_forward)
    assert one(busy(linears="all", recipe="blockwise", gather="weights").matmul_forward) < one(plain.matmul_forward)


def test_experts_keep_their_rate() -> None:
    request = request_of(tiny_mixtral(), "1xH200", global_batch=2, sequence_length=4096)
    plain, short = (busy(request, dp_shard=1, zero=0, linears=choice) for choice in ("none", "all"))
    attention = 4 * 4096 * 2 * (2 * 128 * 128 + 2 * 128 * 64)
    assert one(plain.matmul_forward) - one(short.matmul_forward) < attention  # nothing of the experts' products
    assert one(short.quantise_forward) > 0


def test_casts_are_a_term_of_the_step() -> None:
    found = estimate(REQUEST, plan_with(**SHARDED, linears="all"))
    assert found.time_terms[StepTerm.FLOAT8_CASTS] > 0
    assert found.step_s == pytest.approx(sum(found.time_terms.values()))


@pytest.mark.parametrize("devices", ["8xA100-80GB", "8xV100-32GB", "8xA10G"])
def test_devices_without_float8_products_are_refused(devices: str) -> None:
    request = request_of("llama-3-8b", devices, global_batch=8)
    with pytest.raises(PlanError, match="no float8 matmuls") as refused:
        require_planned(request, plan_with(dp_shard=8, zero=3, linears="all"))
    assert "float8.linears = 'none'" in (refused.value.hint or "")
    answer = search_plans("llama-3-8b", devices, fixed={"float8.linears": "auto"})
    assert not answer.plans
    assert "the devices have no float8 matmuls" in answer.rejected


def test_a_cpu_rounds_and_multiplies_as_it_does_all_else() -> None:
    request = request_of("llama-3-8b", "1xCPU", global_batch=1, sequence_length=512)
    plain, short = (estimate(request, plan_with(linears=choice)) for choice in ("none", "all"))
    assert short.time_terms[StepTerm.MATMUL] == plain.time_terms[StepTerm.MATMUL]
    assert short.step_s > plain.step_s


def test_float8_needs_bfloat16_weights() -> None:
    request = request_of("llama-3-8b", "8xH200", preset="fp32")
    with pytest.raises(PlanError, match="need bfloat16"):
        require_planned(request, plan_with(dp_shard=8, zero=3, linears="all", preset="fp32"))


def test_a_search_takes_float8_where_it_is_asked_for_and_says_what_it_brings() -> None:
    keys: dict[str, Any] = {"float8.linears": "all", "float8.gather": "weights"}
    plain = search_plans("llama-3-8b", "8xH100-80GB", top=1)
    found = search_plans("llama-3-8b", "8xH100-80GB", top=1, fixed=keys)
    best = found.plans[0]
    assert plain.plans[0].plan.float8.linears == "none"
    assert (best.plan.float8.linears, best.plan.float8.gather) == ("all", "weights")
    assert 1.15 < plain.plans[0].step_s / best.step_s < 1.6
    assert "float8 matmuls: 1." in why_best(found)
    assert best.step_s == pytest.approx(estimate(found.request, best.plan).step_s)


def test_what_a_search_finds_is_trained_in_float8() -> None:
    question = ask("llama-3-70b", "4x8xH100-80GB", global_batch=64, sequence_length=8192)
    from weft.plan.search import search

    freedom = built({"float8.linears": "all"})
    found = search(question.request, freedom=freedom, precision=question.precision, top=5)
    assert found.plans
    assert [why_not_trained(each) for each in found.plans] == [""] * len(found.plans)
    instead = best_trained(replace(found, plans=found.plans))
    assert instead is not None
    assert instead.plan.float8.linears == "all"
