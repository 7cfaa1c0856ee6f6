"""The planner's word is a check: traffic and held memory as told pass, others are named."""

from __future__ import annotations

from typing import Any

from weft.core.records import ParameterRecord
from weft.verify.prediction import idle_share, judge

TRAFFIC: list[dict[str, Any]] = [
    {"axis": "dp_shard", "collective": "all_gather", "phase": "forward", "bytes": 1_000_000, "count": 7},
    {"axis": "dp_shard", "collective": "reduce_scatter", "phase": "backward", "bytes": 2_000_000, "count": 7},
]
MEMORY = {"weights": 4_000_000, "optimizer_state": 8_000_000}


def test_what_was_told_passes_with_the_allocators_rounding() -> None:
    held = {**MEMORY, "weights": MEMORY["weights"] + 512 * 20, "activations": 10**9}
    assert judge(TRAFFIC, TRAFFIC, MEMORY, held, tensors=20).ok


def test_a_collective_too_many_or_too_large_is_named() -> None:
    doubled = [{**TRAFFIC[0], "bytes": 2_000_000}, TRAFFIC[1]]
    check = judge(TRAFFIC, doubled, MEMORY, MEMORY, tensors=20)
    assert not check.ok
    assert "dp_shard all_gather forward" in check.detail
    more = [*TRAFFIC, {"axis": "dp_replicate", "collective": "all_reduce", "phase": "backward", "bytes": 5, "count": 1}]
    assert "dp_replicate all_reduce backward" in judge(TRAFFIC, more, MEMORY, MEMORY, tensors=20).detail
    assert not judge(TRAFFIC, TRAFFIC[:1], MEMORY, MEMORY, tensors=20).ok


def test_gradients_and_states_may_be_fewer_where_parameters_get_none() -> None:
    fewer = [TRAFFIC[0], {**TRAFFIC[1], "bytes": 1_500_000}]
    held = {**MEMORY, "optimizer_state": 6_000_000}
    assert not judge(TRAFFIC, fewer, MEMORY, MEMORY, tensors=20).ok
    assert not judge(TRAFFIC, TRAFFIC, MEMORY, held, tensors=20).ok
    check = judge(TRAFFIC, fewer, MEMORY, held, tensors=20, num_untrained=3)
    assert check.ok
    assert "3 parameters get no gradient" in check.detail
    more = [TRAFFIC[0], {**TRAFFIC[1], "bytes": 2_500_000}]
    assert "at most 2,000,000" in judge(TRAFFIC, more, MEMORY, held, tensors=20, num_untrained=3).detail
    gathered = [{**TRAFFIC[0], "bytes": 500_000}, TRAFFIC[1]]
    assert not judge(TRAFFIC, gathered, MEMORY, held, tensors=20, num_untrained=3).ok


def test_weights_of_units_that_do_not_run_are_not_gathered() -> None:
    fewer = [{**TRAFFIC[0], "bytes": 500_000}, TRAFFIC[1]]
    assert judge(TRAFFIC, fewer, MEMORY, MEMORY, tensors=20, num_untrained=3, idle=0.5).ok
    assert not judge(TRAFFIC, fewer, MEMORY, MEMORY, tensors=20, num_untrained=3, idle=0.4).ok
    more = [{**TRAFFIC[0], "bytes": 1_500_000}, TRAFFIC[1]]
    assert not judge(TRAFFIC, more, MEMORY, MEMORY, tensors=20, num_untrained=3, idle=0.9).ok


def test_a_unit_is_idle_if_none_of_its_parameters_gets_a_gradient() -> None:
    def row(name: str, unit: str, elements: int) -> ParameterRecord:
        return ParameterRecord(
            name=name, shape=(elements,), dtype="float32", unit=unit, sharded_axes=(), replicated_axes=(),
            local_elements=elements,
        )  # fmt: skip

    rows = [row("tower.w", "tower", 30), row("tower.b", "tower", 10), row("text.w", "text", 50)]
    rows.append(row("text.b", "text", 10))
    assert idle_share(rows, {"tower.w", "tower.b", "text.b"}) == 0.4
    assert idle_share(rows, {"tower.w"}) == 0.0


def test_states_that_are_not_sharded_are_named() -> None:
    whole = {**MEMORY, "optimizer_state": 4 * MEMORY["optimizer_state"]}
    check = judge(TRAFFIC, TRAFFIC, MEMORY, whole, tensors=20)
    assert not check.ok
    assert "optimizer_state" in check.detail
