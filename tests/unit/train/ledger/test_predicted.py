"""The planner's column: which entry a device has, and that what cannot be predicted is a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import FAMILIES

from weft import hardware
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import StepTerm, TimeTerm
from weft.models.build import build_config
from weft.train.ledger.predicted import predict

DEVICES = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100-80GB",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40S": "L40S",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-16GB": "V100-16GB",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GB200": "GB200",
    "NVIDIA B200": "B200",
    "NVIDIA RTX A4000": None,
    "NVIDIA A10": None,
}


@pytest.mark.parametrize("name", DEVICES)
def test_a_driver_s_name_finds_its_entry(name: str) -> None:
    found, expected = hardware.find_device(name), DEVICES[name]
    assert (found or "").lower() == (expected or "").lower()


def run_of(**train: Any) -> RunSpec:
    tables = {"model": FAMILIES["llama"].model_dump(exclude_none=True), "data": {"sequence_length": 16}}
    return RunSpec.from_tables({**tables, "train": {"global_batch": 8, **train}})


def test_the_planner_is_asked_about_the_very_model_and_precision() -> None:
    config = build_config(FAMILIES["llama"], vocab_size=300)
    plan = Plan.from_tables({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}})
    found, why_not = predict(run_of(optimizer="sgd", momentum=0.0), plan, config=config, device_name="NVIDIA H200")
    assert found is not None, why_not
    assert (found.device, found.request.shape.vocab_size) == ("H200", config.vocab_size)
    assert found.estimate.memory_terms["optimizer_state"] == 0
    assert found.request.precision == plan.precision.policy()
    assert {row["axis"] for row in found.estimate.traffic} == {"dp_shard"}
    seconds = found.time_terms
    assert sum(seconds.values()) == pytest.approx(found.estimate.step_s)
    assert seconds[TimeTerm.OPTIMIZER] == pytest.approx(found.estimate.time_terms[StepTerm.OPTIMIZER])


def test_frozen_parameters_make_a_prediction_that_does_not_bind() -> None:
    config = build_config(FAMILIES["llama"], vocab_size=300)
    found, _ = predict(run_of(frozen=["model.embed_tokens.*"]), Plan(), config=config, device_name=None)
    assert found is not None
    assert (found.device, found.is_binding) == ("CPU", False)
    assert "frozen" in found.notes[0]


def test_what_cannot_be_predicted_is_a_sentence() -> None:
    class Unknown:
        def to_dict(self) -> dict[str, Any]:
            return {"model_type": "no-such-model"}

    config = build_config(FAMILIES["llama"], vocab_size=300)
    cases = {
        "the catalogue has no entry for Abacus 9": predict(run_of(), Plan(), config=config, device_name="Abacus 9"),
        "no predictions: ": predict(run_of(), Plan(), config=Unknown(), device_name=None),
    }
    for sentence, (found, why_not) in cases.items():
        assert found is None
        assert sentence in why_not


def test_the_mfu_of_a_step_follows_from_its_length() -> None:
    """FLOPs of a step over its seconds: twice as long, half the MFU. A CPU's peak is a guess, so it has none."""
    config = build_config(FAMILIES["llama"], vocab_size=300)
    plan = Plan.from_tables({"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "precision": {"preset": "bf16"}})
    found, _ = predict(run_of(), plan, config=config, device_name="NVIDIA H200")
    assert found is not None
    assert found.mfu_at(found.estimate.step_s) == pytest.approx(found.estimate.mfu)
    assert found.mfu_at(2 * found.estimate.step_s) == pytest.approx(found.estimate.mfu / 2)
    assert found.mfu_at(None) is None
    on_cpu, _ = predict(run_of(), plan, config=config, device_name=None)
    assert on_cpu is not None
    assert on_cpu.mfu_at(1.0) is None
