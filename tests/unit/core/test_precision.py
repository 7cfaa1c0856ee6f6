"""Precision policies: presets, what differs from them, and what follows from that."""

from __future__ import annotations

import pytest

from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.core.precision import policy_of, resolve


def test_weights_at_rest_in_bfloat16_have_gradients_in_bfloat16() -> None:
    policy = resolve("bf16", {"master_weights": "bfloat16"})
    assert (policy.gradients, policy.communication, policy.optimizer_state) == ("bfloat16", "float32", "float32")
    assert not policy.is_mixed
    assert policy.is_low
    assert policy.has_low_states


def test_moments_in_bfloat16_change_nothing_else() -> None:
    policy = resolve("bf16", {"optimizer_state": "bfloat16"})
    assert policy.model_copy(update={"optimizer_state": "float32"}) == policy_of("bf16")
    assert policy.has_low_states
    assert not policy_of("bf16").has_low_states


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2}, {"tp": 2}, {"pp": 2}])
def test_moments_in_bfloat16_go_with_every_layout(mesh: dict[str, int]) -> None:
    require_executable(Plan.from_tables({"mesh": mesh, "precision": {"preset": "bf16", "optimizer_state": "bfloat16"}}))


def test_weights_in_bfloat16_are_executed() -> None:
    low = {"preset": "bf16", "optimizer_state": "bfloat16", "master_weights": "bfloat16", "gradients": "bfloat16"}
    require_executable(Plan.from_tables({"mesh": {"dp_shard": 2}, "precision": low}))
