"""Precision policies: presets, what differs from them, and what follows from that."""

from __future__ import annotations

import pytest

from weft.core.errors import PlanError
from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.core.precision import COMPONENTS, GROUPS, KEYS, policy_of, resolve
from weft.core.precision_presets import PRESETS
from weft.core.precision_section import Precision


def test_weights_at_rest_in_bfloat16_have_gradients_in_bfloat16() -> None:
    policy = resolve("bf16", {"master_weights": "bfloat16"})
    assert (policy.gradients, policy.reduce, policy.first_moment) == ("bfloat16", "float32", "float32")
    assert not policy.is_mixed
    assert policy.is_low
    assert policy.has_low_states


def test_moments_in_bfloat16_change_nothing_else() -> None:
    policy = resolve("bf16", {"optimizer_state": "bfloat16"})
    both = {"first_moment": "float32", "second_moment": "float32"}
    assert policy.model_copy(update=both) == policy_of("bf16")
    assert policy.has_low_states
    assert not policy_of("bf16").has_low_states


def test_a_component_goes_before_its_group() -> None:
    policy = resolve("bf16", {"optimizer_state": "bfloat16", "second_moment": "float32"})
    assert (policy.first_moment, policy.second_moment) == ("bfloat16", "float32")


def test_every_component_is_a_key() -> None:
    assert set(Precision.model_fields) - {"preset"} == set(KEYS) == {*COMPONENTS, *GROUPS}


def test_the_presets_of_earlier_versions_mean_what_they_meant() -> None:
    """The router of bf16 aside, which is now float32."""
    float32 = dict.fromkeys(
        ("gradients", "reduce", "master_weights", "first_moment", "second_moment", "loss"), "float32"
    )
    for name, compute in {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.items():
        policy = policy_of(name).model_dump()  # type: ignore[arg-type]
        assert {key: policy[key] for key in float32} == float32
        assert {policy[key] for key in ("weights", "activations", "gather", "products", "logits")} == {compute}
        assert policy_of(name).loss_scaling == (name == "fp16")  # type: ignore[arg-type]
    assert policy_of("bf16").router == "float32"
    assert policy_of("fp16").router == "float16"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_source_and_is_executed(name: str) -> None:
    assert PRESETS[name].source  # type: ignore[index]
    plan = Plan.from_tables({"precision": {"preset": name}, "mesh": {"dp_shard": 2}})
    require_executable(plan)
    assert Plan.from_tables(plan.model_dump(exclude_none=True)) == plan


def test_deepseek_v3_switches_on_products_and_exchanges_in_float8() -> None:
    plan = Plan.from_tables({"precision": {"preset": "deepseek-v3"}, "mesh": {"dp_shard": 2}})
    assert (plan.float8.linears, plan.float8.recipe, plan.expert_parallel.wire) == ("all", "blockwise", "float8")
    policy = plan.policy()
    assert (policy.products, policy.dispatch, policy.combine) == ("float8_e4m3", "float8_e4m3", "bfloat16")
    assert (policy.first_moment, policy.second_moment, policy.master_weights) == ("bfloat16", "bfloat16", "float32")
    off = Plan.from_tables({"precision": {"preset": "deepseek-v3"}, "float8": {"linears": "none"}})
    assert (off.policy().products, off.policy().gather) == ("bfloat16", "bfloat16")


def test_weights_travel_as_codes_with_any_products() -> None:
    sharded = {"data_parallel": {"zero": 3}, "mesh": {"dp_shard": 2}}

    def plan(float8: dict[str, str], **precision: str) -> Plan:
        return Plan.from_tables({**sharded, "precision": {"preset": "bf16", **precision}, "float8": float8})

    assert plan({}, gather="int8").coded_gather == "int8"
    assert plan({}, gather="float8_e4m3").coded_gather == "float8_e4m3"
    assert plan({"linears": "all"}, gather="int8").coded_gather == "int8"
    assert plan({"linears": "all"}).coded_gather is None, "layers gather float8 with a scale per tensor"
    assert plan({"linears": "all"}).policy().gather == "float8_e4m3"
    assert Plan.from_tables({"precision": {"preset": "bf16", "gather": "int8"}}).coded_gather is None, "no shards"
    with pytest.raises(PlanError, match=r"precision.gather is 'int8', but float8.gather says float8"):
        plan({"linears": "all", "gather": "float8"}, gather="int8")


@pytest.mark.parametrize(
    ("precision", "word"),
    [
        ({"preset": "fp32", "optimizer_state": "bfloat16"}, "weights in float32"),
        ({"preset": "bf16", "second_moment": "float16"}, "underflows"),
        ({"preset": "bf16", "first_moment": "int8"}, "adamw8bit"),
        ({"preset": "fp32", "products": "float8_e4m3"}, "products"),
        ({"preset": "bf16", "products": "tf32"}, "products"),
        ({"preset": "bf16", "gather": "float32"}, "gather"),
        ({"preset": "bf16", "gather": "float8_e5m2"}, "gather"),
        ({"preset": "bf16", "activations": "float32"}, "activations"),
        ({"preset": "bf16", "dispatch": "int8"}, "dispatch"),
        ({"preset": "bf16", "combine": "float8_e5m2"}, "combine"),
        ({"preset": "bf16", "experts": "float8_e4m3"}, "experts"),
        ({"preset": "bf16", "router": "float16"}, "router"),
        ({"preset": "bf16", "logits": "float16"}, "logits"),
        ({"preset": "bf16", "softmax": "bfloat16"}, "kernels"),
        ({"preset": "bf16", "norm_statistics": "bfloat16"}, "kernels"),
        ({"preset": "bf16", "aux_loss": "bfloat16"}, "small terms"),
        ({"preset": "bf16", "loss": "bfloat16"}, "small terms"),
        ({"preset": "bf16", "gradients": "int8"}, "range"),
        ({"preset": "bf16", "reduce": "float16"}, "range"),
        ({"preset": "bf16", "weights": "int8"}, "scale"),
        ({"preset": "fp16", "master_weights": "bfloat16"}, "weights in float16"),
    ],
)
def test_an_impossible_pair_is_refused_with_the_reason(precision: dict[str, str], word: str) -> None:
    with pytest.raises(PlanError, match=word) as error:
        Plan.from_tables({"precision": precision})
    assert error.value.hint


def test_a_section_that_contradicts_a_component_is_refused() -> None:
    tables = {"precision": {"preset": "bf16", "products": "bfloat16"}, "float8": {"linears": "all"}}
    with pytest.raises(PlanError, match=r"float8\.linears"):
        Plan.from_tables(tables)


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}])
def test_moments_in_bfloat16_go_with_every_layout(mesh: dict[str, int]) -> None:
    require_executable(Plan.from_tables({"mesh": mesh, "precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}))


def test_weights_in_bfloat16_are_executed() -> None:
    low = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16", "gradients": "bfloat16"}
    require_executable(Plan.from_tables({"mesh": {"dp_shard": 2}, "precision": low}))
