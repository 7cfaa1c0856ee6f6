"""Every preset of formats against one process with the same rounding: single device, ZeRO-3, tp, pp, ep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gloo_ranks import run_ranks
from verify_ranks import small_run, verdicts_in_rank

from weft.core.executable import not_executed_reasons
from weft.core.plan import Plan
from weft.core.precision_presets import PRESETS

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "ZeRO-3": {"mesh": {"dp_shard": 2}, "data_parallel": {"zero": 3}, "pipeline": {"microbatches": 2}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}},
    "ep": {"mesh": {"dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}},
}
# weights that are their own masters: every copy must be rounded alike, wherever its numbers lie in the full tensor
COPIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied tables of two stages": ("qwen3-tied", 2, {"mesh": {"pp": 2}, "pipeline": {"microbatches": 2}}),
    "repeated heads": ("llama", 4, {"mesh": {"tp": 4}}),
    "a grid": ("llama", 4, {"mesh": {"tp": 4}, "tensor_parallel": {"mode": "2d"}}),
    "tp and pp": ("qwen3-tied", 4, {"mesh": {"tp": 2, "pp": 2}, "pipeline": {"microbatches": 2}}),
    "tp and ep": ("mixtral", 4, {"mesh": {"tp": 2, "dp_shard": 2, "ep": 2}, "data_parallel": {"zero": 3}}),
    "zero bubble": ("llama", 2, {"mesh": {"pp": 2}, "pipeline": {"microbatches": 4, "schedule": "zero_bubble"}}),
}
# the rest of the components that may differ from a preset
COMPONENTS = {"preset": "bf16", "gradients": "bfloat16", "second_moment": "bfloat16", "logits": "float32"}


def tables(precision: dict[str, str], layout: str) -> dict[str, Any]:
    return {**LAYOUTS[layout], "precision": precision}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_no_layout_refuses_a_preset(name: str, layout: str) -> None:
    assert list(not_executed_reasons(Plan.from_tables(tables({"preset": name}, layout)))) == []


def wrong_checks(precision: dict[str, str], layout: str, corpus: Path, scratch: Path) -> list[str]:
    has_blocks = precision.get("preset") == "deepseek-v3"  # which one rank must have in full
    model = {"ep": "mixtral", "tp": "llama-blocks" if has_blocks else "llama"}.get(layout, "llama")
    run = small_run(str(corpus), model=model)
    world = 1 if layout == "single" else 2
    verdicts = run_ranks(verdicts_in_rank, world, run, [tables(precision, layout)], str(scratch), timeout_s=500)[0]
    return [f"{check['name']}: {check['detail']}" for check in verdicts[0]["checks"] if not check["ok"]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_verified(name: str, layout: str, corpus: Path, tmp_path: Path) -> None:
    assert wrong_checks({"preset": name}, layout, corpus, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_copies_of_weights_without_masters_stay_equal(name: str, corpus: Path, tmp_path: Path) -> None:
    model, ranks, layout = COPIES[name]
    plan = {**layout, "precision": {"preset": "bf16-pure"}}
    (verdict,) = run_ranks(verdicts_in_rank, ranks, small_run(str(corpus), model=model), [plan], str(tmp_path))[0]
    assert [f"{check['name']}: {check['detail']}" for check in verdict["checks"] if not check["ok"]] == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_components_that_are_refused_are_known(layout: str) -> None:
    plan = Plan.from_tables(tables(COMPONENTS, layout))
    assert bool(list(not_executed_reasons(plan))) == (layout in ("ZeRO-3", "tp"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["single", "pp", "ep"])
def test_components_are_verified(layout: str, corpus: Path, tmp_path: Path) -> None:
    assert wrong_checks(COMPONENTS, layout, corpus, tmp_path) == []
