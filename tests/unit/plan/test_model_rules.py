"""Models that cannot be divided as the plan says are refused before ranks start, with the error of the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drawn import MODELS

from weft.core.errors import ModelError, NotBuiltError, PipelineError, PlanError, TensorParallelError, WeftError
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.engine.tp.apply import require_regions
from weft.engine.tp.one_d_shards import require_degree
from weft.models.build import build_config, build_skeleton
from weft.models.layout import describe
from weft.models.tp.finder import find_tensor_layout
from weft.plan.legality import is_legal, require_legal
from weft.plan.model_rules import tensor_reasons
from weft.plan.resolve import resolve
from weft.train.job import Job

BYTES = 257
ROWS = {"data": {"tokenizer": "bytes", "sequence_length": 24}, "train": {"global_batch": 48}}


def run_of(model: str, **sections: Any) -> RunSpec:
    return RunSpec.from_tables({"model": MODELS[model], **ROWS, **sections})


@pytest.mark.parametrize(
    ("model", "plan", "run", "error", "words"),
    [
        ("llama", {"mesh": {"tp": 3}}, {}, TensorParallelError, "heads must divide over tp"),
        (
            "llama",
            {"mesh": {"tp": 2}, "float8": {"linears": "all", "recipe": "blockwise"}},
            {},
            TensorParallelError,
            "whole blocks of float8 scales",
        ),
        ("llama", {"mesh": {"pp": 4}}, {}, PipelineError, "every pipeline stage needs a block"),
        ("llama", {"mesh": {"pp": 2}, "pipeline": {"blocks": [2, 1]}}, {}, PipelineError, "does not partition"),
        (
            "llama-tied",
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream", "microbatches": 4}},
            {},
            PipelineError,
            "share a tied table",
        ),
        (
            "llama",
            {"activations": {"policy": "budget", "mixture": [2, 1]}},
            {},
            PlanError,
            "more blocks than the model",
        ),
        (
            "llama",
            {"activations": {"offload": "cpu", "offload_blocks": 3}},
            {},
            PlanError,
            "more blocks than keep their activations",
        ),
        (
            "opt",
            {},
            {"data": {**ROWS["data"], "packing": "documents"}},
            NotBuiltError,
            "not known to isolate packed documents",
        ),
        ("llama", {}, {"router": {"z_loss": 0.1}}, ModelError, "it has no experts"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_before_ranks_start(
    model: str, plan: dict[str, Any], run: dict[str, Any], error: type[WeftError], words: str
) -> None:
    spec = run_of(model, **run)
    with pytest.raises(error, match=words) as refused:
        require_legal(Plan.from_tables(plan), spec)
    assert refused.value.hint
    with pytest.raises(error, match=words):
        Job.create(run=spec, plan_tables=plan, device="cpu", out="nowhere")
    # the caller's own model, which [model] does not describe, is judged by the engine alone
    Job.create(run=spec, plan_tables=plan, device="cpu", out="nowhere", has_own_model=True)


@pytest.mark.parametrize("model", ["llama", "gpt2", "phi3", "gemma2", "gpt_oss", "mixtral", "deepseek_v3"])
def test_degrees_are_refused_where_the_engine_refuses_them(model: str) -> None:
    run = run_of(model)
    skeleton = build_skeleton(build_config(run.model, vocab_size=BYTES), attention="sdpa")
    tensors = find_tensor_layout(skeleton, describe(skeleton))
    for tp in (2, 3, 4, 6, 8):
        plan = Plan.from_tables({"mesh": {"tp": tp}, "tensor_parallel": {"sequence_parallel": False}})
        try:
            require_regions(tensors, model)
            require_degree(tensors, tp)
            is_refused = False
        except WeftError:
            is_refused = True
        assert bool(tensor_reasons(plan, run)) == is_refused, tp


@pytest.mark.parametrize("keys", [{"policy": "budget"}, {"offload": "cpu", "offload_blocks": "auto"}])
def test_open_choices_are_no_reason(keys: dict[str, Any]) -> None:
    require_legal(Plan.from_tables({"mesh": {"tp": 2}, "activations": keys}), run_of("llama"))


def test_choices_are_not_made_by_the_shape_of_another_model() -> None:
    tables = {"activations": {"policy": "budget"}}
    with pytest.raises(PlanError, match=r"cannot choose the recompute mixture.*a model of your own"):
        Job.create(run=run_of("llama"), plan_tables=tables, device="cpu", out="nowhere", has_own_model=True)
    assert not Job.create(run=run_of("llama"), plan_tables=tables, device="cpu", out="nowhere").plan.activations.is_open
    experts = {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 1}}
    for has_own_model in (True, False):
        plan = resolve(experts, run_of("mixtral"), on_gpu=False, has_own_model=has_own_model)
        assert plan.has_open_dispatcher == has_own_model


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({"type": "gpt2", "config": {"n_positions": 16}}, {}),
        ({"type": "opt"}, {"activations": {"sequence_chunk": 8}}),
        ({"type": "llama"}, {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 1}}),
        ({"type": "gemma2"}, {"mesh": {"cp": 2}, "context_parallel": {"attention": "ring"}}),
        ({"type": "llama"}, {"mesh": {"tp": 3}, "tensor_parallel": {"sequence_parallel": False}}),
    ],
)
def test_no_rule_judges_a_callers_own_model_by_the_run(model: dict[str, Any], plan: dict[str, Any]) -> None:
    run, asked = RunSpec.from_tables({**ROWS, "model": model}), Plan.from_tables(plan)
    assert not is_legal(asked, run)
    require_legal(asked, run, has_own_model=True)
    assert resolve(plan, run, on_gpu=False, has_own_model=True).mesh == asked.mesh


def test_the_model_is_asked_once_for_many_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches over ranks and `verify --all` judge many plans of one run, and building a model takes a second."""
    built = []

    def build(*args: Any, **keys: Any) -> Any:
        built.append(args)
        return build_skeleton(*args, **keys)

    monkeypatch.setattr("weft.plan.cp.families.build_skeleton", build)
    run = run_of("llama", train={"global_batch": 96})  # of no other test
    for microbatches in (1, 2, 4):
        assert is_legal(Plan.from_tables({"mesh": {"cp": 2}, "pipeline": {"microbatches": microbatches}}), run)
    assert len(built) == 1


def test_a_config_that_changes_under_its_path_is_asked_again(tmp_path: Path) -> None:
    plan = Plan.from_tables({"mesh": {"tp": 4}, "tensor_parallel": {"sequence_parallel": False}})
    run = RunSpec.from_tables({**ROWS, "model": {"path": str(tmp_path)}})
    for heads in (2, 4):
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
        config = {"model_type": "llama", **sizes, "num_key_value_heads": heads}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        assert is_legal(plan, run) == (heads == 4)
