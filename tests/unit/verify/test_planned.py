"""The planner's collectives are a check: other numbers are named, and what cannot be compared is reported."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from weft.core.plan import Plan
from weft.core.records import ParameterRecord
from weft.core.run_spec import RunSpec
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.verify.planned import PlannedCollectives, check_collectives

LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 257,
}  # fmt: skip
SHARDED = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}}
TENSOR = {"mesh": {"tp": 2}}


def planned(
    tables: dict[str, Any], *, extra: int = 0, rows: int = 8, model: dict[str, Any] | None = None, **train: Any
) -> PlannedCollectives:
    """Of four blocks in two micro-batches; `extra` parameters that the planner does not know."""
    model = model or {"type": "llama", "config": LLAMA}
    run = RunSpec.from_tables(
        {"model": model, "data": {"sequence_length": 8}, "train": {"global_batch": rows, **train}}
    )
    config = build_config(run.model, vocab_size=257, end_of_document=256)
    skeleton = build_skeleton(config)
    layout = describe(skeleton)
    coverage = [
        ParameterRecord(
            name=name, shape=tuple(value.shape), dtype="float32", unit=layout.unit_of[name], sharded_axes=(),
            replicated_axes=(), local_elements=value.numel(),
        )
        for name, value in skeleton.named_parameters()
    ]  # fmt: skip
    if extra:
        coverage.append(dataclasses.replace(coverage[0], name="other", shape=(extra,)))
    plan = Plan.from_tables({"pipeline": {"microbatches": 2}, **tables})
    return PlannedCollectives.of(run, plan, config=config, coverage=coverage)


def sent(expected: PlannedCollectives, **changes: int) -> list[dict[str, Any]]:
    """The most that is planned; `changes` are added by collective, to its first row."""
    counts = {key: round(most) for key, (_, most) in expected.bounds.items()}
    for name, change in changes.items():
        key = next((key for key in counts if key[1] == name), ("world", name, "forward"))
        counts[key] = counts.get(key, 0) + change
    return [
        {"axis": axis, "collective": name, "phase": phase, "bytes": 64, "count": count}
        for (axis, name, phase), count in counts.items()
    ]


# plan -> collectives of a step
PLANNED: list[tuple[dict[str, Any], str]] = [
    ({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}}, "5 all_gather, 5 reduce_scatter"),
    ({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 2}}, "5 all_gather, 10 reduce_scatter"),
    (SHARDED, "20 all_gather, 10 reduce_scatter"),
    ({"mesh": {"dp_shard": 2, "dp_replicate": 2}}, "20 all_gather, 5 all_reduce, 10 reduce_scatter"),
    ({"mesh": {"dp_replicate": 2}}, "1 all_reduce"),
    (TENSOR, "36 all_gather, 9 all_reduce, 32 reduce_scatter"),
    ({"mesh": {"pp": 2}, "pipeline": {"microbatches": 4}}, "4 send"),
    ({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d", "sequence_parallel": False}}, "broadcast"),
    ({}, "none: one rank needs none"),
]


@pytest.mark.parametrize(("tables", "detail"), PLANNED)
def test_numbers_are_the_planner_s(tables: dict[str, Any], detail: str) -> None:
    expected = planned(tables, rows=16)
    check = check_collectives(expected, sent(expected))
    assert check.ok, check.detail
    assert detail in check.detail
    for name in {*(key[1] for key in expected.bounds), "all_to_all"}:
        finding = check_collectives(expected, sent(expected, **{name: 7})).finding
        assert finding is not None
        assert name in finding.expected
    if expected.bounds:
        assert not check_collectives(expected, []).ok


def test_collectives_of_another_axis_are_wrong() -> None:
    expected = planned(SHARDED)
    moved = [{**row, "axis": "dp_replicate"} for row in sent(expected)]
    assert "found 10" in check_collectives(expected, moved).detail


def test_buffers_and_groups_of_one_rank_are_left_out() -> None:
    expected = planned(SHARDED)
    beside = {"axis": "dp_shard", "collective": "all_reduce", "count": 3}
    rows = [*sent(expected), {**beside, "phase": "buffer", "bytes": 64}, {**beside, "phase": "backward", "bytes": 0}]
    assert check_collectives(expected, rows).ok


def test_frozen_parameters_may_send_less_but_not_more() -> None:
    expected = planned(SHARDED, frozen=["lm_head.*"])
    check = check_collectives(expected, sent(expected, reduce_scatter=-2))
    assert check.ok
    assert "frozen" in check.detail
    assert not check_collectives(expected, sent(expected, reduce_scatter=1)).ok


def test_tiny_tensors_are_not_observed() -> None:
    """Micro-batches of eight tokens: the largest logit of each is too small to count."""
    expected = planned(TENSOR, rows=2)
    assert check_collectives(expected, sent(expected, all_reduce=-2)).ok
    assert not check_collectives(planned(TENSOR), sent(planned(TENSOR), all_reduce=-2)).ok


def test_a_model_of_another_size_is_compared_by_kind_on_the_tensor_axis() -> None:
    expected = planned({"mesh": {"tp": 2, "dp_shard": 2}, "data_parallel": {"zero": 1}}, extra=5)
    dp = next(row for row in sent(expected) if row["axis"] == "dp_shard")
    others = [row for row in sent(expected) if row is not dp and row != dp]
    tp = next(row for row in others if row["axis"] == "tp")
    more = [dp, *({**row, "count": row["count"] + (row is tp)} for row in others)]
    check = check_collectives(expected, more)
    assert check.ok, check.detail
    assert "tp by kind only: the planner counts" in check.detail
    assert not check_collectives(expected, [{**dp, "count": dp["count"] + 1}, *others]).ok
    assert not check_collectives(expected, [*more, {**tp, "collective": "broadcast"}]).ok


def test_collectives_of_experts_are_exact() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    tables = {**TENSOR, "tensor_parallel": {"sequence_parallel": False}}
    expected = planned(tables, model={"type": "mixtral", "config": {**LLAMA, **experts}})
    for change in (-1, 0, 1):
        rows = [{**row, "count": row["count"]} for row in sent(expected, all_reduce=0)]
        backward = next(row for row in rows if row["phase"] == "backward")
        backward["count"] += change
        assert check_collectives(expected, rows).ok == (change == 0)


def test_a_model_that_the_planner_cannot_shape_is_not_judged() -> None:
    check = check_collectives(PlannedCollectives(not_judged="no predictions: unknown"), sent(planned(SHARDED)))
    assert check.ok
    assert "not judged: no predictions: unknown" in check.detail
