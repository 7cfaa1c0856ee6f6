"""Words into a request: which attention runs, keys that nothing looks at, a strategy without ranks."""

from __future__ import annotations

import pytest

from weft.core.errors import BadValueError, PlanError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.plan.ask import ask, estimate_plan, search_plans

SINKS, CAPPED, PLAIN = "gpt-oss-20b", "gemma-2-9b", "llama-3-8b"
PLAN = Plan.from_tables({"mesh": {"dp_shard": 8}, "precision": {"preset": "bf16"}, "compile": {"enabled": True}})


@pytest.mark.parametrize("model", [SINKS, CAPPED])
def test_attention_that_no_kernel_computes_is_said_to_be_written_out(model: str) -> None:
    found = ask(model, "8xH100-80GB")
    assert any("written out" in line and "model.attention=fused" in line for line in found.assumed)
    assert not any("written out" in line for line in ask(PLAIN, "8xH100-80GB").assumed)


@pytest.mark.parametrize("model", [SINKS, CAPPED])
def test_the_workload_says_which_attention_runs(model: str) -> None:
    steps = {
        kind: estimate_plan(model, PLAN, "8xH100-80GB", global_batch=8, sequence_length=8192, attention=kind)
        for kind in (None, "sdpa", "eager", "fused")
    }
    assert steps[None].step_s == steps["sdpa"].step_s == steps["eager"].step_s  # what training does with this family
    assert steps["fused"].step_s < 0.8 * steps["eager"].step_s
    assert steps["fused"].memory_terms["activations"] < 0.5 * steps["eager"].memory_terms["activations"]
    assert any("fused kernel" in line for line in ask(model, "8xH100-80GB", attention="fused").assumed)


def test_a_family_with_a_kernel_may_be_asked_to_write_its_scores() -> None:
    sdpa, eager, fused = (
        estimate_plan(PLAIN, PLAN, "8xH100-80GB", global_batch=8, sequence_length=8192, attention=kind).step_s
        for kind in ("sdpa", "eager", "fused")
    )
    assert sdpa == fused < eager


def test_an_attention_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadValueError, match="flesh"):
        ask(PLAIN, "8xH100-80GB", attention="flesh")


def test_a_search_refuses_a_key_that_nothing_looks_at() -> None:
    with pytest.raises(BadValueError, match="does not vary"):
        search_plans("gpt2", "1xH100-80GB", fixed={"data_parallel.strategy": "dataparallel"})


@pytest.mark.parametrize(
    ("devices", "found"), [("1xH200", "there is one"), ("1xCPU", "there is none"), ("8xH200", "no formulas")]
)
def test_dataparallel_is_refused_for_the_reason_that_training_gives(devices: str, found: str) -> None:
    plan = Plan.from_tables({"data_parallel": {"strategy": "dataparallel"}})
    with pytest.raises(PlanError, match=f"spreads one process over several GPUs, and .*{found}"):
        estimate_plan("gpt2", plan, devices)


def test_document_length_is_for_rows_of_documents() -> None:
    run = {"model": {"type": "llama"}, "data": {"sequence_length": 512, "packing": "documents"}}
    packed = RunSpec.from_tables(run)
    whole = RunSpec.from_tables({**run, "data": {"sequence_length": 512}})
    assert ask(packed, "1xH200", document_length=100.0).request.workload.attended_length == 100
    assert ask(packed, "1xH200").request.workload.attended_length == 512
    with pytest.raises(BadValueError, match="rows of this run are whole"):
        ask(whole, "1xH200", document_length=100.0)
    with pytest.raises(BadValueError, match="not between 1 and the 512"):
        ask(packed, "1xH200", document_length=513)
