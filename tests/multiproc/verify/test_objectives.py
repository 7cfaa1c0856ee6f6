"""Objectives other than the next token under every kind of layout that trains them: verified, planted bugs caught."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import objective_mutations as bugs
import pytest
from gloo_ranks import run_ranks
from mutation_groups import Bug, Group, require_caught
from pairs import write_pairs
from samples import by_default
from verify_ranks import Tables, small_run, verdicts_of_many_in_rank

from weft.core.run_spec import RunSpec
from weft.models.build import build_config
from weft.verify.small_teacher import write_teacher

LIMIT_S = 900
BYTE_TOKENS = 257
DDP = {"mesh": {"dp_replicate": 2}}
ZERO_3 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}}
TENSOR = {"mesh": {"tp": 2}}
PIPELINE = {"mesh": {"pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}}
ZERO_1 = {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 1}, "pipeline": {"microbatches": 2}}
EXPERTS = {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}}

DPO, NO_REFERENCE = {"kind": "dpo"}, {"kind": "dpo", "reference": "none", "beta": 0.5, "label_smoothing": 0.1}
IPO, ORPO, REWARD = {"kind": "dpo", "loss": "ipo"}, {"kind": "orpo"}, {"kind": "reward", "center": 0.01}
# name -> model, objective, plan
CASES: dict[str, tuple[str, Tables, Tables]] = {
    "dpo, DDP": ("gpt2", DPO, DDP),
    "dpo, ZeRO-3": ("llama", DPO, ZERO_3),
    "dpo, tp": ("llama", DPO, TENSOR),
    "dpo, pp": ("qwen3-tied", DPO, PIPELINE),
    "dpo, ep": ("mixtral", DPO, EXPERTS),
    "dpo without a reference, DDP": ("qwen3-tied", NO_REFERENCE, DDP),
    "ipo, tp": ("qwen3-tied", IPO, TENSOR),
    "ipo, ZeRO-3": ("llama", IPO, ZERO_3),
    "orpo, tp": ("llama", ORPO, TENSOR),
    "orpo, pp": ("llama", ORPO, PIPELINE),
    "orpo, ep": ("mixtral", ORPO, EXPERTS),
    "reward, DDP": ("qwen3-tied", REWARD, DDP),
    "reward, ZeRO-3": ("llama", REWARD, ZERO_3),
    "reward, pp": ("llama", REWARD, PIPELINE),
    "reward, ep": ("mixtral", REWARD, EXPERTS),
}
SHARES = {kind: tuple(name for name in CASES if name.startswith(kind)) for kind in ("dpo", "ipo", "orpo", "reward")}


def pair_data(folder: Path) -> Tables:
    return {
        "source": str(write_pairs(folder / "pairs.jsonl", count=40)),
        "format": "preference",
        "truncation": "start",
        "sequence_length": 32,
    }


def cases_of(names: tuple[str, ...], folder: Path) -> dict[str, tuple[Tables, Tables]]:
    data = pair_data(folder)
    found: dict[str, Any] = {}
    for name in names:
        model, objective, plan = CASES[name]
        found[name] = small_run(data["source"], model=model, data=data, objective=objective), plan
    return found


@pytest.mark.parametrize("share", by_default([], SHARES, extended=["reward"]))
def test_healthy_layouts_pass(share: str, tmp_path: Path) -> None:
    cases = cases_of(SHARES[share], tmp_path)
    (tmp_path / "scratch").mkdir()
    found = run_ranks(verdicts_of_many_in_rank, 2, cases, str(tmp_path / "scratch"), timeout_s=LIMIT_S)[0]
    assert {name: verdict["checks"] for name, verdict in found.items() if not verdict["ok"]} == {}
    for name, verdict in found.items():
        details = {check["name"]: check["detail"] for check in verdict["checks"]}
        assert "80 answers read again" in details["oracle data"], name
        assert "not judged" not in details["oracle loss"] + details["collectives"] + details["prediction"], name
        has_reference = (CASES[name][1]["kind"], CASES[name][1].get("reference")) == ("dpo", None)
        assert ("reference" in details) == has_reference, name


# name -> student, plan; HSDP has four ranks
DISTILLED: dict[str, tuple[str, Tables]] = {
    "DDP": ("llama", DDP),
    "ZeRO-1": ("gpt2", ZERO_1),
    "ZeRO-3": ("qwen3-tied", ZERO_3),
    "HSDP": ("llama", {"mesh": {"dp_replicate": 2, "dp_shard": 2}, "data_parallel": {"zero": 3}}),
    "tp": ("llama", {"mesh": {"tp": 2}, "tensor_parallel": {"loss_parallel": False}}),
}


def distillation(folder: Path) -> Tables:
    """An objective whose teacher drops when it is not in evaluation mode."""
    spec = RunSpec.from_tables({"model": {"type": "gpt2", "config": {"n_embd": 32, "n_layer": 1, "n_head": 2}}})
    config = build_config(spec.model, vocab_size=BYTE_TOKENS)
    write_teacher(config, folder / "teacher")
    return {"kind": "distillation", "teacher": str(folder / "teacher"), "temperature": 2.0, "alpha": 0.7}


@pytest.mark.parametrize("name", by_default([], DISTILLED, extended=["ZeRO-1"]))
def test_distillation_passes(name: str, corpus: Path, tmp_path: Path) -> None:
    model, plan = DISTILLED[name]
    run = small_run(str(corpus), model=model, objective=distillation(tmp_path))
    (tmp_path / "scratch").mkdir()
    ranks = 4 if name == "HSDP" else 2
    cases = {name: (run, plan)}
    found = run_ranks(verdicts_of_many_in_rank, ranks, cases, str(tmp_path / "scratch"), timeout_s=LIMIT_S)[0][name]
    assert found["ok"], found["checks"]
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert "distillation written out" in details["oracle loss"]
    assert "not judged" not in details["collectives"] + details["prediction"]


BUGS: dict[str, Group] = {
    "dpo": Group(
        plan=ZERO_3,
        objective=DPO,
        bugs=(
            Bug(mutate=bugs.answers_swapped_on_one_rank, check="gradients", step=1),
            Bug(mutate=bugs.beta_is_ignored, check="gradients", step=1),
            Bug(mutate=bugs.reference_of_other_rows, check="reference"),
            Bug(mutate=bugs.loop_reads_the_reference_of_other_pairs, check="training loop"),
            Bug(mutate=bugs.mean_over_the_pairs_of_a_microbatch, check="loss", step=1),
            Bug(mutate=bugs.divided_by_tokens, check="loss", step=1),
        ),
    ),
    "distillation": Group(
        plan=ZERO_1,
        bugs=(
            Bug(mutate=bugs.temperature_is_not_squared, check="loss", step=1),
            Bug(mutate=bugs.teacher_is_in_training_mode, check="loss", step=1),
            Bug(mutate=bugs.teacher_learns_of_other_rows_on_one_rank, check="loss", step=1),
        ),
    ),
}


@pytest.mark.slow
def test_bugs_of_pairs_are_caught(tmp_path: Path) -> None:
    group = replace(BUGS["dpo"], data=pair_data(tmp_path))
    require_caught(group, tmp_path / "pairs.jsonl", _made(tmp_path / "scratch"))


@pytest.mark.slow
def test_bugs_of_distillation_are_caught(corpus: Path, tmp_path: Path) -> None:
    group = replace(BUGS["distillation"], objective=distillation(tmp_path))
    require_caught(group, corpus, _made(tmp_path / "scratch"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
