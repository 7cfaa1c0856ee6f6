"""Folding the coverage list: equal blocks become one group, like parameters one row, and nothing is lost or hidden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.report import write_report
from weft.report.training.coverage import group_coverage, item_bytes, label_units, parse_records
from weft.report.training.coverage_table import MAX_ROWS, limit_rows


def test_equal_blocks_become_one_group(coverage_of: Any) -> None:
    records = parse_records(coverage_of(44))
    root, blocks = group_coverage(records)
    assert len(records) == 399
    assert blocks.label == "model.layers.0–43"
    assert len(blocks.rows) == 9
    assert (root.num_parameters, blocks.num_parameters) == (3, 396)


def test_a_block_that_differs_stays_apart(coverage_of: Any) -> None:
    fields = coverage_of(8)
    odd = next(row for row in fields if row["name"] == "model.layers.3.mlp.up_proj.weight")
    odd["sharded_axes"], odd["replicated_axes"] = [], ["dp_shard"]
    labels = [group.label for group in group_coverage(parse_records(fields))]
    assert labels == ["(root)", "model.layers.0–2, 4–7", "model.layers.3"]


def test_experts_become_one_row(parameter_of: Any) -> None:
    unit = "layers.0"
    fields = [parameter_of(f"{unit}.experts.{expert}.w1", (4, 4), unit=unit) for expert in range(64)]
    (group,) = group_coverage(parse_records(fields))
    (row,) = group.rows
    assert (row.record.name, row.count, group.elements) == ("experts.*.w1", 64, 64 * 16)


def test_tied_weights_are_counted_once(coverage_of: Any) -> None:
    root = group_coverage(parse_records(coverage_of(1)))[0]
    assert root.elements == 260 * 256 + 256
    assert [row.record.tied_to for row in root.rows] == [None, None, "model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("units", "label"),
    [
        (["h.0"], "h.0"),
        (["h.0", "h.1", "h.2", "h.7"], "h.0–2, 7"),
        (["a.1.b", "a.2.b"], "a.1–2.b"),
        ([f"h.{2 * i}" for i in range(20)], "h.0, 2, 4, 6, 8, 10, 12, 14, …"),
        (["enc.0.1", "enc.1.0"], "enc.0.1 … enc.1.0"),
    ],
)
def test_units_are_named_by_their_range(units: list[str], label: str) -> None:
    assert label_units(units) == label


def test_dtype_sizes() -> None:
    sizes = [item_bytes(dtype) for dtype in ("float32", "bfloat16", "float8_e4m3fn", "uint8", "?")]
    assert sizes == [4, 2, 1, 1, None]


def test_rows_without_a_name_or_shape_are_left_out() -> None:
    assert parse_records([{}, {"name": "x"}, {"name": "x", "shape": "y"}]) == []


def test_ten_thousand_parameters_make_a_small_table(
    whole_folder: Callable[..., Path], ledger_of: Any, coverage_of: Any, parameter_of: Any, page_of: Any
) -> None:
    fields = coverage_of(50)
    for layer in range(50):
        unit = f"model.layers.{layer}"
        fields += [
            parameter_of(f"{unit}.experts.{e}.{w}", (8, 8), unit=unit) for e in range(64) for w in ("w1", "w2", "w3")
        ]
        router = {"axes": (), "replicated_axes": ("dp_shard",), "local_elements": 512, "trainable": False}
        fields.append(parameter_of(f"{unit}.router.weight", (8, 64), unit=unit, **router))
    page = page_of(write_report(whole_folder(num_steps=2, ledger={**ledger_of(), "coverage": fields})))
    assert len(fields) > 10_000
    assert "10,103 parameters in 51 units." in page.text
    assert (
        "50 stayed replicated, which costs each rank 100.0 KiB of weights. 1 tied to another. 50 frozen." in page.text
    )
    assert "experts.*.w1 ×64" in page.text
    assert page.tags["tr"] < 80


def test_a_model_that_does_not_fold_is_cut_and_says_so(
    whole_folder: Callable[..., Path], ledger_of: Any, parameter_of: Any, page_of: Any
) -> None:
    fields = [parameter_of(f"p{index}", (index + 1,), unit="(root)") for index in range(10_000)]
    page = page_of(write_report(whole_folder(num_steps=2, ledger={**ledger_of(), "coverage": fields})))
    assert f"{10_000 - MAX_ROWS:,} more rows are not drawn here" in page.text
    assert page.tags["tr"] < MAX_ROWS + 60


def test_cutting_counts_what_is_left_out(coverage_of: Any) -> None:
    groups = group_coverage(parse_records(coverage_of(2)))
    assert limit_rows(groups, limit=100) == (groups, 0)
    kept, num_left_out = limit_rows(groups, limit=5)
    assert (sum(len(group.rows) for group in kept), num_left_out) == (5, 7)
    assert limit_rows(groups, limit=3)[1] == 9
