"""The choice of blocks: fits where anything does, nothing again where that fits, no faster mixture that fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import plan_with, request_of, tiny_llama, tiny_mixtral

from weft.core.errors import PlanError
from weft.core.open_choices import with_mixture
from weft.core.plan import Plan
from weft.core.terms import MemoryTerm
from weft.plan.arithmetic import explain_memory
from weft.plan.ask import estimate_plan
from weft.plan.estimate import estimate
from weft.plan.memory.budget import choose_mixture, every_mixture, with_chosen_mixture
from weft.plan.plan_rows import columns_of
from weft.plan.request import Request
from weft.plan.words import describe

LAYOUTS: list[dict[str, Any]] = [
    {"dp_replicate": 8},
    {"dp_shard": 8, "zero": 3},
    {"tp": 4, "dp_shard": 2, "zero": 1},
    {"pp": 2, "dp_replicate": 4, "microbatches": 4},
    {"dp_shard": 8, "zero": 2, "enabled": True},
]


def asked(shape: Any, *, memory_bytes: float) -> Request:
    request = request_of(shape, global_batch=64, sequence_length=2048)
    device = replace(request.cluster.device, memory_bytes=int(memory_bytes / request.memory_share))
    return replace(request, cluster=replace(request.cluster, device=device))


def costs(request: Request, plan: Plan, mixture: tuple[int, int]) -> tuple[int, float]:
    found = estimate(request, with_mixture(plan, mixture))
    return found.memory_bytes, found.step_s


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from([tiny_llama(num_hidden_layers=3), tiny_llama(num_hidden_layers=5), tiny_mixtral()]),
    st.sampled_from(LAYOUTS),
    st.floats(-0.2, 1.2),
)
def test_no_mixture_that_fits_is_faster(shape: Any, keys: dict[str, Any], share: float) -> None:
    """`share` 0: so little memory as everything computed again needs; 1: as much as nothing does."""
    plan, blocks = plan_with(policy="budget", preset="bf16", **keys), shape.num_layers
    roomy = asked(shape, memory_bytes=1e12)
    least, most = (costs(roomy, plan, mixture)[0] for mixture in ((blocks, 0), (0, 0)))
    request = asked(shape, memory_bytes=least + share * (most - least))
    every = [(int(f), int(s)) for f, s in every_mixture(blocks, may_select=not plan.compile.enabled)]
    fitting = {
        mixture: step_s
        for mixture in every
        for memory_bytes, step_s in [costs(request, plan, mixture)]
        if memory_bytes <= request.budget_bytes
    }
    chosen = choose_mixture(request, plan)
    if (0, 0) in fitting:
        assert chosen == (0, 0)
    elif not fitting:
        assert chosen == (blocks, 0)
    else:
        assert fitting[chosen] == pytest.approx(min(fitting.values()))
        assert sum(chosen) > 0


def test_every_mixture_of_three_blocks() -> None:
    assert [tuple(row) for row in every_mixture(3)] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0)
    ]  # fmt: skip
    assert [tuple(row) for row in every_mixture(3, may_select=False)] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_a_budget_is_faster_than_the_one_policy_that_fits() -> None:
    """Llama-3-8B, two sequences of 8,192 on an H100: selective is 10 GiB too much."""
    request = request_of(global_batch=16, sequence_length=8192)
    layout = {"dp_shard": 8, "zero": 3, "preset": "bf16"}
    selective, full = (estimate(request, plan_with(policy=policy, **layout)) for policy in ("selective", "full"))
    found = estimate(request, with_chosen_mixture(request, plan_with(policy="budget", **layout)))
    assert (selective.fits, full.fits, found.fits) == (False, True, True)
    assert found.step_s < 0.9 * full.step_s
    assert found.memory_bytes > 0.95 * request.budget_bytes


def test_a_given_mixture_is_not_chosen_again() -> None:
    plan = plan_with(dp_shard=8, zero=3, policy="budget", mixture=[3, 4])
    assert with_chosen_mixture(request_of(), plan) == plan


def test_an_open_budget_is_resolved_where_it_is_estimated_and_never_guessed() -> None:
    plan = plan_with(policy="budget", preset="bf16", dp_shard=8, zero=3)
    found = estimate_plan("llama-3-8b", plan, "8xH100-80GB", global_batch=16, sequence_length=8192)
    assert found.fits
    assert found.plan.activations.mixture is not None
    with pytest.raises(PlanError, match=r"has no activations\.mixture"):
        columns_of([plan])


def test_more_blocks_than_there_are_is_refused() -> None:
    with pytest.raises(PlanError, match="more blocks than the model has") as caught:
        estimate_plan("llama-3-8b", plan_with(dp_shard=8, zero=3, policy="budget", mixture=[30, 3]), "8xH100-80GB")
    assert "32" in caught.value.hint


def test_the_arithmetic_has_a_line_for_each_sort_of_block() -> None:
    request = request_of(global_batch=16, sequence_length=8192)
    found, lines = explain_memory(
        request, plan_with(dp_shard=8, zero=3, preset="bf16", policy="budget", mixture=[8, 20])
    )
    said = [line.formula for line in lines if line.term == MemoryTerm.ACTIVATIONS]
    assert [line.partition(" B x ")[2] for line in said[:3]] == [
        "4 dense blocks (saved)",
        "20 dense blocks (recomputed selectively)",
        "8 dense blocks (recomputed)",
    ]
    told = sum(line.bytes for line in lines if line.term == MemoryTerm.ACTIVATIONS)
    assert told == pytest.approx(found.memory_terms[MemoryTerm.ACTIVATIONS])
    assert describe(found.plan).endswith("recompute of 8 full + 20 selective blocks")
