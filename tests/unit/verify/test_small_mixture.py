"""The recompute mixture of a shrunk model: every policy in use keeps a block, and changes are reported."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.verify.shrink import shrink
from weft.verify.small_mixture import in_proportion, mixture_of_all, shrink_mixture


def run_of(layers: int) -> RunSpec:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": layers}
    return RunSpec.from_tables({"model": {"type": "llama", "config": sizes}})


def plan_of(mixture: list[int], **tables: object) -> Plan:
    return Plan.from_tables({"activations": {"policy": "budget", "mixture": mixture}, **tables})


def small(plan: Plan, run: RunSpec) -> tuple[Plan, list[str]]:
    short, changes = shrink(run, plan, vocab_size=64)
    found, mixed = shrink_mixture(plan, original=run, small=short, vocab_size=64)
    return found, [*changes, *mixed]


@given(st.integers(3, 130), st.integers(3, 130), st.data())
def test_no_policy_is_lost_or_added(whole: int, size: int, data: st.DataObject) -> None:
    size = min(whole, size)
    full = data.draw(st.integers(0, whole))
    selective = data.draw(st.integers(0, whole - full))
    fewer = in_proportion((full, selective), original=whole, small=size)
    assert sum(fewer) <= size
    assert [count > 0 for count in (*fewer, size - sum(fewer))] == [
        count > 0 for count in (full, selective, whole - full - selective)
    ]


def test_a_mixture_follows_the_depth_and_an_open_one_has_every_policy() -> None:
    given_, changes = small(plan_of([3, 5]), run_of(12))
    assert given_.activations.mixture == (1, 1)
    assert "activations.mixture [3, 5] -> [1, 1]" in changes
    opened, changes = small(plan_of([]), run_of(12))
    assert opened.activations.mixture == (1, 1)
    assert any("every policy" in line for line in changes)
    compiled, _ = small(plan_of([], compile={"enabled": True}), run_of(12))
    assert compiled.activations.mixture == (1, 0)
    assert mixture_of_all(2, may_select=True) == (1, 0)


def test_a_mixture_too_large_stays_so() -> None:
    with pytest.raises(PlanError, match="is 13 blocks, but the model has 12"):
        small(plan_of([3, 10]), run_of(12))


def test_other_plans_stay_as_they_are() -> None:
    plan = Plan.from_tables({"activations": {"policy": "full"}})
    assert small(plan, run_of(12))[0] == plan
