"""Each judgement on made-up courses: it passes what is right, fails what is wrong, and names it exactly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.core.records import DtypeRecord
from weft.verify.checks import check_same_bits, check_scalars, check_tensors, worst_scalars
from weft.verify.facts import check_dtypes, check_initial, check_replicas, check_rows
from weft.verify.layouts import coordinates_of, other_layout, plan_name
from weft.verify.run_trace import RunTrace
from weft.verify.tolerances import SLACK, UNIT_ROUNDOFF

TRUTH = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64), "b": torch.ones(3, dtype=torch.float64)}
SAME = {name: value + 1e-7 for name, value in TRUTH.items()}
FLOAT32: dict[str, Any] = {"rule": 1, "dtype": "float32"}


def test_scalars_within_rounding_pass_and_tell_the_margin() -> None:
    check = check_scalars("loss", [5.0, 4.0], [5.0 + 1e-6, 4.0], [5.0 + 4e-6, 4.0], rule=1)
    assert check.ok
    assert 0 < check.margin < 1


@pytest.mark.parametrize("value", [4.001, math.nan, math.inf])
def test_a_wrong_scalar_names_its_step(value: float) -> None:
    check = check_scalars("loss", [5.0, 4.0], [5.0, 4.0], [5.0, value], rule=1)
    assert check.finding is not None
    assert check.finding.step == 2
    assert check.finding.expected.startswith("4 within")
    assert check.finding.found == f"{value:.9g}"


def test_a_series_that_is_too_short_is_wrong() -> None:
    assert not check_scalars("loss", [5.0, 4.0], [5.0, 4.0], [5.0], rule=1).ok


def test_a_drift_widens_one_value_alone() -> None:
    found = [5.001, 4.001]
    assert not check_scalars("loss", [5.0, 4.0], [5.0, 4.0], found, rule=1, drifts=[0.01, 0.0]).ok
    assert check_scalars("loss", [5.0, 4.0], [5.0, 4.0], found, rule=1, drifts=[0.01, 0.01]).ok


def test_tensors_within_a_few_measured_distances_pass() -> None:
    found = {name: value + (SLACK - 1) * 1e-7 for name, value in TRUTH.items()}
    check, worst = check_tensors("gradients", TRUTH, SAME, found, **FLOAT32)
    assert check.ok
    assert worst.parameter == "b"


def test_a_wrong_tensor_names_the_element_and_the_rank_that_holds_it() -> None:
    found = {**TRUTH, "a": TRUTH["a"] + torch.tensor([[0, 0], [0.1, 0]])}
    plan = Plan.from_tables({"mesh": {"dp_replicate": 2, "dp_shard": 2}})
    owners = {"a": [((0, 1),), ((1, 2),), ((0, 1),), ((1, 2),)]}
    check, worst = check_tensors(
        "gradients", TRUTH, SAME, found, step=1, owners=owners,
        describe_rank=lambda rank: coordinates_of(plan, rank), **FLOAT32,
    )  # fmt: skip
    assert check.finding is not None
    assert check.finding.parameter == "a"
    assert check.finding.coordinates == "element [1, 0] on rank 1 (dp_replicate 0, dp_shard 1)"
    assert (check.finding.expected[:2], check.finding.found[:3]) == ("3 ", "3.1")
    assert worst.parameter == "a"


@pytest.mark.parametrize("found", [{"a": TRUTH["a"]}, {**TRUTH, "c": TRUTH["b"]}])
def test_missing_and_extra_tensors_are_wrong(found: dict[str, torch.Tensor]) -> None:
    check, worst = check_tensors("gradients", TRUTH, SAME, found, **FLOAT32)
    assert check.finding is not None
    assert check.finding.parameter == worst.parameter == ("b" if "b" not in found else "c")


def test_another_shape_and_nan_are_wrong() -> None:
    assert not check_tensors("weights", TRUTH, SAME, {**TRUTH, "a": torch.ones(2)}, **FLOAT32)[0].ok
    check, worst = check_tensors("weights", TRUTH, SAME, {**TRUTH, "b": TRUTH["b"] * math.nan}, **FLOAT32)
    assert not check.ok
    assert worst.rel_diff == math.inf


def test_a_low_precision_tensor_is_not_excused_by_its_format() -> None:
    """One rounding of bfloat16 is allowed where nothing was measured, no more."""
    bound = UNIT_ROUNDOFF["bfloat16"]
    for factor, ok in ((0.9, True), (2.0, False)):
        found = {name: value * (1 + factor * bound) for name, value in TRUTH.items()}
        assert check_tensors("gradients", TRUTH, TRUTH, found, rule=1, dtype="bfloat16")[0].ok is ok


def test_same_bits_sees_one_bit_anywhere() -> None:
    course = RunTrace(losses=[5.0], norms=[1.0], weights={"w": torch.ones(2)}, optimizer={"w.step": torch.tensor(1.0)})
    assert check_same_bits("resume", course, course, rule=5, detail="").ok
    next_up = math.nextafter(5.0, 6.0)
    other = RunTrace(losses=[next_up], norms=[1.0], weights=course.weights, optimizer=course.optimizer)
    assert check_same_bits("resume", course, other, rule=5, detail="").finding.step == 1  # type: ignore[union-attr]
    bits = torch.nextafter(torch.ones(2), torch.full((2,), 2.0))
    other = RunTrace(losses=[5.0], norms=[1.0], weights={"w": bits}, optimizer=course.optimizer)
    assert check_same_bits("resume", course, other, rule=5, detail="").finding.parameter == "w"  # type: ignore[union-attr]
    other = RunTrace(losses=[5.0], norms=[1.0], weights=course.weights, optimizer={})
    finding = check_same_bits("resume", course, other, rule=5, detail="").finding
    assert finding is not None
    assert finding.parameter == "optim w.step"


def batch_of(*rows: list[int]) -> dict[str, torch.Tensor]:
    tokens = torch.tensor(rows)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def test_rows_are_compared_one_by_one() -> None:
    right = [batch_of([1, 2, 3], [4, 5, 6]), batch_of([7, 8, 9], [1, 1, 2])]
    assert check_rows(right, right, describe_row=str).ok
    found = [right[0], batch_of([7, 8, 9], [1, 3, 2])]
    finding = check_rows(right, found, describe_row=lambda row: f"rank {row}").finding
    assert finding is not None
    assert (finding.step, finding.coordinates) == (2, "row 1 on rank 1")
    assert finding.expected == "input_ids[1:] [1]"
    assert finding.found == "[3]"


def test_labels_that_are_not_the_next_tokens_are_wrong_on_both_sides() -> None:
    shifted = batch_of([1, 2, 3], [4, 5, 6])
    shifted["labels"] = shifted["input_ids"].clone()
    assert not check_rows([shifted], [shifted], describe_row=str).ok


def test_initial_weights_are_compared_bit_by_bit() -> None:
    right = {"w": torch.ones(2, 2)}
    assert check_initial(right, {"w": torch.ones(2, 2)}, describe_owner=lambda *_: "").ok
    found = {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-7]])}
    finding = check_initial(right, found, describe_owner=lambda name, row: f" on the owner of {name}[{row}]").finding
    assert finding is not None
    assert finding.coordinates == "element [1, 1] on the owner of w[1]"
    assert not check_initial(right, {}, describe_owner=lambda *_: "").ok


def test_a_replica_with_other_bits_is_named() -> None:
    assert check_replicas({"w": [1, 1]}, describe_rank=str).ok
    finding = check_replicas({"v": [1, 1, 1], "w": [1, 1, 2]}, describe_rank=lambda rank: f"rank {rank}").finding
    assert finding is not None
    assert (finding.parameter, finding.coordinates) == ("w", "rank 2")


def test_a_dtype_that_was_not_asked_for_is_named() -> None:
    right = DtypeRecord(component="weights", asked="bfloat16", found=("bfloat16",))
    wrong = DtypeRecord(component="communication", asked="float32", found=("bfloat16", "float32"))
    assert check_dtypes([right]).ok
    finding = check_dtypes([right, wrong]).finding
    assert finding is not None
    assert (finding.parameter, finding.expected, finding.found) == ("communication", "float32", "bfloat16, float32")


def test_the_largest_difference_of_nan_is_infinite() -> None:
    assert worst_scalars([1.0, 2.0], [1.5, 2.0], relative=False) == 0.5
    assert worst_scalars([1.0, 2.0], [1.0, 3.0], relative=True) == 0.5
    assert worst_scalars([1.0], [math.nan], relative=False) == math.inf


def test_names_and_coordinates_of_plans() -> None:
    plan = Plan.from_tables({"mesh": {"dp_replicate": 2, "dp_shard": 3}, "precision": {"preset": "bf16"}})
    assert plan_name(plan) == "HSDP ZeRO-3 (FSDP), dp_replicate 2 x dp_shard 3, 1 micro-batch, bf16"
    assert coordinates_of(plan, 4) == "rank 4 (dp_replicate 1, dp_shard 1)"
    assert coordinates_of(Plan(), 0) == "rank 0"
    experts = {"mesh": {"dp_shard": 4, "ep": 2}, "expert_parallel": {"dispatcher": "tokens"}}
    name = "ZeRO-3 (FSDP), dp_shard 4, ep 2 by tokens, 1 micro-batch, fp32"
    assert plan_name(Plan.from_tables(experts)) == name
    assert coordinates_of(Plan.from_tables(experts), 3) == "rank 3 (dp_shard 3, ep 1)"
    mesh = {"dp_shard": 2, "tp": 2, "ep": 2}
    folded, width = (
        Plan.from_tables({"mesh": mesh, "expert_parallel": {"tensor": tensor}}) for tensor in ("folded", "width")
    )
    assert coordinates_of(folded, 2) == "rank 2 (dp_shard 1, tp 0, ep 0)"
    assert coordinates_of(width, 2) == "rank 2 (dp_shard 1, tp 0, ep 1)"
    assert "ep 2 by auto, width, 1 micro-batch" in plan_name(width)
    other = other_layout(plan, global_batch=12)
    assert (other.mesh.dp_replicate, other.data_parallel.zero, other.precision.preset) == (6, 0, "bf16")
    assert other_layout(other, global_batch=12).data_parallel.zero == 3


# mesh and stage, global batch -> mesh and stage of the other layout
ELSEWHERE = {
    "alone": ({"tp": 2}, 0, 8, (1, 2, 1, 3)),
    "half of it": ({"tp": 4}, 0, 8, (1, 2, 2, 3)),
    "beside shards": ({"tp": 4, "dp_shard": 2}, 2, 8, (4, 1, 2, 0)),
    "no power of two": ({"tp": 6}, 0, 12, (1, 6, 1, 3)),
    "too few rows": ({"tp": 2}, 0, 1, (1, 1, 2, 3)),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_tensor_parallelism_resumes_at_another_degree(case: str) -> None:
    mesh, stage, rows, expected = ELSEWHERE[case]
    plan = Plan.from_tables({"mesh": mesh, "data_parallel": {"zero": stage}, "pipeline": {"microbatches": 4}})
    other = other_layout(plan, global_batch=rows)
    assert (other.mesh.dp_replicate, other.mesh.dp_shard, other.mesh.tp, other.data_parallel.zero) == expected
    assert rows % (other.mesh.dp_degree * other.pipeline.microbatches) == 0


@pytest.mark.parametrize(("tp", "is_partitioned"), [(2, False), (4, True)])
def test_partitioned_inputs_need_tensor_parallel_ranks_elsewhere_too(tp: int, is_partitioned: bool) -> None:
    tables = {
        "mesh": {"tp": tp},
        "tensor_parallel": {"sequence_parallel": False},
        "activations": {"policy": "full", "partition": True},
    }
    other = other_layout(Plan.from_tables(tables), global_batch=8)
    require_executable(other)
    assert other.activations.partition == is_partitioned


def test_the_name_of_a_tensor_parallel_plan_tells_its_switches() -> None:
    tables = {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": False}}
    assert plan_name(Plan.from_tables(tables)) == "tensor parallel, tp 2, 1d with LP, 1 micro-batch, fp32"
