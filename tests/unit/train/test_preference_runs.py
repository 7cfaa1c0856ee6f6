"""Runs on pairs: the reference is of the initial weights, over resumes and adapters; refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pairs import pair_settings, write_pairs
from tiny_run import call_weft, curve, metrics, run_tables, stop_after, train_here, write_run

from weft.core.errors import BadValueError, NotBuiltError, RunChangedError
from weft.core.objective_spec import ObjectiveSpec
from weft.core.plan import Plan
from weft.core.run_spec import RunSpec
from weft.core.terms import MemoryTerm
from weft.dryrun.run import dry_run
from weft.plan.ask import estimate_plan, search_plans
from weft.plan.legality import require_legal
from weft.train.folder.run_folder import RunFolder

LORA = {"adapter": {"kind": "lora", "rank": 4}}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs.jsonl")


def tables(pairs: Path, **objective: Any) -> RunSpec:
    return RunSpec.from_tables(run_tables(pairs, pair_settings(**objective)))


@pytest.mark.parametrize("kept", ["table", "no table"])
@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_a_resume_has_the_reference_of_the_first_weights(
    kept: str, more: dict[str, Any], tmp_path: Path, pairs: Path
) -> None:
    settings = {**pair_settings(), **more}
    train_here(tmp_path / "straight", pairs, settings)
    with stop_after(3):
        train_here(tmp_path / "halves", pairs, settings)
    table = RunFolder(tmp_path / "halves").reference_path
    assert table.exists()
    if kept == "no table":
        table.unlink()
    train_here(tmp_path / "halves", pairs, settings, resume=True)
    assert curve(tmp_path / "halves") == curve(tmp_path / "straight")
    figures = metrics(tmp_path / "straight")[-1]["figures"]
    assert figures["reward_margin"] > 0


def test_held_out_pairs_have_the_loss_of_pairs(tmp_path: Path, pairs: Path) -> None:
    settings = {**pair_settings(), "data.eval_fraction": 0.2, "evaluation": {"every": 6, "batches": 1}}
    train_here(tmp_path / "run", pairs, {**settings, "train.learning_rate": 1e-12})
    assert metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize(
    ("plan", "objective", "settings", "sentence"),
    [
        (
            {"mesh": {"pp": 2}, "pipeline": {"schedule": "pipedream", "microbatches": 2}},
            {},
            {},
            "'dpo' with pipeline.schedule = 'pipedream'",
        ),
        ({"mesh": {"cp": 2}}, {}, {}, "'dpo' with mesh.cp = 2"),
        ({"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}, {}, {}, "tensor_parallel.mode = '2d'"),
        ({"kernels": {"loss": "fused"}}, {}, {}, "a fused loss"),
        ({}, {}, {"data.streaming": True}, "a reference and data.streaming"),
        ({}, {}, {"train.on_bad_step": "rewind"}, "on_bad_step = 'rewind', which reads more samples"),
        ({}, {"kind": "next_token"}, {}, "'next_token' does not train on pairs"),
        ({}, {}, {"data.format": "prompt-completion"}, "needs pairs, and data.format is 'prompt-completion'"),
    ],
)
def test_what_is_not_built_is_named(
    plan: dict[str, Any], objective: dict[str, Any], settings: dict[str, Any], sentence: str, pairs: Path
) -> None:
    run = RunSpec.from_tables(run_tables(pairs, {**pair_settings(**objective), **settings}))
    with pytest.raises(NotBuiltError, match=sentence):
        require_legal(Plan.from_tables(plan), run)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"kind": "next_token", "beta": 0.2}, "beta needs kind = 'dpo'"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "label_smoothing is for loss = 'sigmoid'"),
    ],
)
def test_keys_that_do_not_fit_are_named(keys: dict[str, Any], sentence: str, pairs: Path) -> None:
    with pytest.raises(BadValueError, match=sentence):
        tables(pairs, **keys)


@pytest.mark.extended
def test_verify_knows_the_objective(tmp_path: Path, pairs: Path) -> None:
    """An epoch of its finite pairs has three steps at this global batch."""
    code, out, said = call_weft("verify", write_run(tmp_path / "run.toml", pairs, pair_settings()))
    assert (code, "FAIL" in out) == (0, False), out + said


def test_a_resume_with_another_beta_needs_its_name(tmp_path: Path, pairs: Path) -> None:
    with stop_after(2):
        train_here(tmp_path / "run", pairs, pair_settings())
    with pytest.raises(RunChangedError, match=r"objective\.beta"):
        train_here(tmp_path / "run", pairs, pair_settings(beta=0.5), resume=True)


def test_plans_of_pairs_count_two_rows_and_keep_pairs_whole(pairs: Path) -> None:
    run = tables(pairs)
    found = search_plans(run, "2xCPU", top=20)
    assert found.plans
    for one in found.plans:
        require_legal(one.plan, run)
    alone = run.model_copy(update={"objective": ObjectiveSpec()})
    pairs_bytes, rows_bytes = (
        estimate_plan(one, Plan(), "1xCPU").memory_terms[MemoryTerm.LOGITS] for one in (run, alone)
    )
    assert pairs_bytes == 2 * rows_bytes
    with pytest.raises(NotBuiltError, match=r"not executed with mesh.cp = 2"):
        search_plans(run, "2xCPU", fixed={"mesh.cp": 2})


def test_the_dry_run_has_both_rows_of_a_pair(pairs: Path) -> None:
    run = tables(pairs)
    predicted = estimate_plan(run, Plan(), "1xCPU").memory_bytes
    found = dry_run(run, Plan(), on_gpu=False)
    assert found.peak.peak_bytes == pytest.approx(predicted, rel=0.1)


def test_the_dry_run_of_a_stage_receives_both_rows_of_a_pair(pairs: Path) -> None:
    run = tables(pairs)
    plan = Plan.from_tables({"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}})
    single = run.model_copy(
        update={"objective": ObjectiveSpec(), "data": run.data.model_copy(update={"format": "chat"})}
    )
    sent = [
        sum(row["bytes"] for row in dry_run(one, plan, rank=0, on_gpu=False).traffic if row["axis"] == "pp")
        for one in (run, single)
    ]
    assert sent[0] >= 2 * sent[1] * 0.99 > 0
