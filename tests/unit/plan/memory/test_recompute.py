"""What the planner counts of a rank's blocks is what the rule says of each of them, on every place of a pipeline."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import request_of, view_with

from weft.core.mixture import BlockPolicy, block_policies
from weft.plan.pp.stages import _block_ranges
from weft.plan.view import View

PIPELINES: list[dict[str, Any]] = [
    {},
    {"pp": 4, "microbatches": 8},
    {"pp": 4, "microbatches": 8, "blocks": [10, 5, 2, 15]},
    {"pp": 4, "microbatches": 8, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"pp": 4, "microbatches": 8, "schedule": "zbv", "virtual_stages": 2},
]


def own_blocks(view: View, mixture: tuple[int, int]) -> list[tuple[int, BlockPolicy]]:
    """(kind, policy) of each of the rank's blocks, first block first."""
    shape, place = view.shape, ("first", "middle", "last")[view.place]
    (key,) = view.columns.pipelines[0]
    every = block_policies("budget", mixture, num_blocks=shape.num_layers)
    ranges = _block_ranges(shape, key, place)  # type: ignore[arg-type]
    return [(shape.order[block], every[block]) for begin, end in ranges for block in range(begin, end)]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["llama-3-8b", "jamba-v0.1"]),
    st.sampled_from(PIPELINES),
    st.integers(0, 2),
    st.integers(0, 32),
    st.integers(0, 32),
)
def test_counts_of_a_rank(model: str, keys: dict[str, Any], place: int, full: int, both: int) -> None:
    full, both = sorted((full, both))
    mixture = (full, both - full)
    view = view_with(request_of(model), place if keys else 0, policy="budget", mixture=mixture, **keys)
    recomputed, mine = view.stage.recomputed, own_blocks(view, mixture)
    assert len(mine) == view.stage.blocks.sum()
    found = Counter(mine)
    for kind in range(len(view.shape.kinds)):
        assert recomputed.full[0, kind] == found[kind, "full"]
        assert recomputed.selective[0, kind] == found[kind, "selective"]
    for done in range(len(mine) + 1):
        last = Counter(policy for _, policy in mine[len(mine) - done :])
        assert recomputed.finished(np.full(1, float(done))) == (last["full"], last["selective"])
    policies = [policy for _, policy in reversed(mine)]
    for way in ("full", "selective"):
        expected = policies.index(way) if way in policies else 0
        assert recomputed.above_last(way) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("keys", PIPELINES[:2])
def test_a_mixture_of_one_sort_costs_what_the_policy_does(policy: str, keys: dict[str, Any]) -> None:
    from plan_cases import columns_with

    from weft.plan.estimate import estimate_columns

    request = request_of()
    mixture = {"none": (0, 0), "selective": (0, 32), "full": (32, 0)}[policy]
    costs = estimate_columns(
        request, columns_with({"policy": policy, **keys}, {"policy": "budget", "mixture": mixture, **keys})
    )
    assert costs.memory.total[0] == pytest.approx(costs.memory.total[1])
    assert costs.step_s[0] == pytest.approx(costs.step_s[1])
    assert all(row.bytes[0] == pytest.approx(row.bytes[1]) for row in costs.traffic.rows)
