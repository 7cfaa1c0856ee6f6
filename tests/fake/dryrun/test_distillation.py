"""The planner counts a teacher: its memory agrees with the dry run, and a search leaves out layouts that divide it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from samples import by_default

from weft.core.errors import NotBuiltError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm as Term
from weft.core.terms import StepTerm
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan, search_plans

WITHIN = 0.02
VOCABULARY, ROWS, LENGTH = 8192, 16, 256
STUDENT = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY,
}  # fmt: skip
TEACHER = {**STUDENT, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
TEACHER_PARAMETERS = 6 * (2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1408) + 2 * VOCABULARY * 512 + 13 * 512
PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"mesh": {"dp_shard": 4}, "data_parallel": {"zero": 3}},
    "DDP": {"mesh": {"dp_replicate": 2}, "pipeline": {"microbatches": 2}},
    "tp": {"mesh": {"dp_shard": 2, "tp": 2}, "tensor_parallel": {"loss_parallel": False}},
}


@pytest.fixture
def teacher(tmp_path: Path) -> str:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TEACHER}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def a_run(teacher: str | None) -> RunSpec:
    objective = {"kind": "distillation", "teacher": teacher} if teacher else {}
    return RunSpec.from_tables(
        {
            "model": {"type": "llama", "config": STUDENT},
            "objective": objective,
            "data": {"sequence_length": LENGTH},
            "train": {"global_batch": ROWS},
        }
    )


@pytest.mark.parametrize(
    ("name", "preset"), by_default([], [(n, p) for n in PLANS for p in ("bf16", "fp32")], extended=[("ZeRO-3", "bf16")])
)
def test_memory_of_the_planner_is_that_of_the_dry_run(name: str, preset: str, teacher: str) -> None:
    plan = Plan.from_tables({**PLANS[name], "precision": {"preset": preset}, "compile": {"enabled": False}})
    devices = f"{plan.num_ranks}xH100-80GB"
    planned, found = estimate_plan(a_run(teacher), plan, devices), dry_run(a_run(teacher), plan).peak
    alone = estimate_plan(a_run(None), plan, devices)
    size = 2 if preset == "bf16" else 4
    weights = planned.memory_terms[Term.WEIGHTS]
    assert weights - alone.memory_terms[Term.WEIGHTS] == size * TEACHER_PARAMETERS
    assert weights == pytest.approx(found.terms[Term.WEIGHTS], rel=1e-3)
    logits = ROWS * LENGTH * VOCABULARY // (plan.mesh.dp_degree * plan.pipeline.microbatches)
    assert planned.memory_terms[Term.LOGITS] == logits * (20 + 2 * size)
    assert planned.memory_terms[Term.LOGITS] == pytest.approx(found.terms[Term.LOGITS], rel=WITHIN)
    total = sum(value for term, value in planned.memory_terms.items() if term != Term.FRAMEWORK)
    assert total == pytest.approx(found.peak_bytes, rel=WITHIN)


def test_its_forward_is_in_the_time_of_a_step(teacher: str) -> None:
    plan = Plan.from_tables({**PLANS["ZeRO-3"], "precision": {"preset": "bf16"}})
    both, alone = (estimate_plan(a_run(each), plan, "4xH100-80GB") for each in (teacher, None))
    assert alone.time_terms[StepTerm.TEACHER] == 0
    assert both.step_s == pytest.approx(alone.step_s + both.time_terms[StepTerm.TEACHER])
    least = 2 * (TEACHER_PARAMETERS - VOCABULARY * 512) * ROWS * LENGTH / 4 / 989e12  # no embedding; the H100's peak
    assert both.time_terms[StepTerm.TEACHER] > least


def test_layouts_that_divide_it_are_not_planned(teacher: str) -> None:
    answer = search_plans(a_run(teacher), "4xH100-80GB")
    assert answer.plans
    for found in answer.plans:
        mesh = found.plan.mesh
        assert (mesh.pp, mesh.cp, mesh.ep, found.plan.kernels.loss) == (1, 1, 1, "whole")
        assert mesh.tp == 1 or not found.plan.tensor_parallel.loss_parallel
    with pytest.raises(NotBuiltError, match=r"loss_parallel"):
        estimate_plan(a_run(teacher), Plan.from_tables({"mesh": {"tp": 4}}), "4xH100-80GB")
