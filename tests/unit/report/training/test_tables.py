"""Tables: the dtype verdict above all, and columns that nobody filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.report.folder import TrainingFolder, read_folder
from weft.report.training import costs, tables

Write = Callable[..., Path]


@pytest.fixture
def folder_of(whole_folder: Write, ledger_of: Any) -> Callable[..., TrainingFolder]:
    return lambda **parts: read_folder(whole_folder(num_steps=2, ledger={**ledger_of(), **parts}))


@pytest.mark.parametrize(
    ("found", "is_ok"),
    [(["torch.float32"], True), (["float32"], True), (["torch.float32", "torch.bfloat16"], False), ([], True)],
)
def test_a_dtype_is_right_when_all_that_was_found_is_what_was_asked(found: list[str], is_ok: bool) -> None:
    assert tables.dtype_ok({"component": "weights", "asked": "float32", "found": found}) is is_ok


def test_a_dtype_that_differs_is_named_above_the_table(folder_of: Any) -> None:
    wrong = {"component": "gradients", "asked": "float32", "found": ["torch.bfloat16"]}
    unseen = {"component": "router", "asked": "float32", "found": []}
    markup = tables.dtypes(folder_of(dtypes=[wrong, unseen]))
    assert "✗ Not as asked: gradients." in markup
    assert markup.count("✗ differs") == 1
    assert markup.count("not seen") == 1
    assert "✓" not in markup


def test_columns_without_a_number_are_left_out(folder_of: Any) -> None:
    terms = {"weights": {"predicted": None, "dry_run": None, "measured": 1024}}
    assert "predicted" not in costs.memory_terms(folder_of(memory={"terms": terms}))
    terms["weights"]["predicted"] = 2048
    markup = costs.memory_terms(folder_of(memory={"terms": terms}))
    assert markup.index("2.0 KiB") < markup.index("1.0 KiB")
    assert "dry run" not in markup


def test_traffic_is_shown_when_there_is_some(folder_of: Any) -> None:
    assert costs.traffic(folder_of()) == ""
    row = {"axis": "dp_shard", "collective": "all_gather", "phase": "forward", "count": 7, "measured": 4096}
    markup = costs.traffic(folder_of(traffic=[{**row, "predicted": 2048, "dry_run": None, "error": 1.0}]))
    assert markup.index("2.0 KiB") < markup.index("4.0 KiB") < markup.index("+100.0%")
    assert "dry run" not in markup


def test_terms_have_their_error_and_their_total(folder_of: Any) -> None:
    row = {"predicted": 2048, "dry_run": 1024, "measured": 1024, "error": -0.5}
    total = {**row, "measured": 4096, "error": 1.0}
    markup = costs.memory_terms(folder_of(memory={"terms": {"weights": row}, "total": total}))
    assert markup.index("dry run") < markup.index("-50.0%") < markup.index("in the allocator") < markup.index("+100.0%")


def test_predictions_that_were_off_are_named(folder_of: Any) -> None:
    assert costs.remarks(folder_of()) == ""
    markup = costs.remarks(folder_of(warnings=["memory term <x>: much"], remarks=["no dry run: it was interrupted"]))
    assert "✗ Prediction off: memory term &lt;x&gt;: much." in markup
    assert "no dry run: it was interrupted" in markup


def test_seconds_of_collectives(folder_of: Any) -> None:
    assert costs.collectives(folder_of()) == ""
    row = {"axis": "dp_shard", "collective": "all_gather", "measured": 0.012}
    assert "12ms" in costs.collectives(folder_of(time={"collectives": [row]}))


def test_sampled_steps_hold_the_first_and_the_last(whole_folder: Write) -> None:
    steps = read_folder(whole_folder(num_steps=150)).metrics.steps
    markup = tables.sampled_steps(steps)
    assert markup.count("<tr>") == 1 + tables.NUM_SAMPLED_STEPS
    assert f"{steps[0].loss:.4f}" in markup
    assert f"{steps[-1].loss:.4f}" in markup
    assert tables.sampled_steps([]) == ""


def test_the_worst_float8_layers_are_shown_where_they_were_measured(folder_of: Any) -> None:
    assert tables.float8_accuracy(folder_of()) == ""
    row = {"layer": "layers.0.q_proj", "step": 4, "weight": [0.5, 0.25, 0.125]}
    found = {"num_layers": 14, "worst": [row], "unquantised": [{"layer": "layers.0.q_proj", "step": 4}]}
    markup = tables.float8_accuracy(folder_of(float8=found))
    for part in ("50.00%", "25.00%", "12.50%", "of 14 measured", "unquantised in the end: layers.0.q_proj"):
        assert part in markup
