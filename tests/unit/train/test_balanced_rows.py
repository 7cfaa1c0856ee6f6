"""A run of packed documents in its balanced order: the curve of the drawn order, and no sample lost over a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_run import metrics, stop_after, train_here

PACKED: dict[str, Any] = {
    "train.steps": 6,
    "train.global_batch": 8,
    "data.packing": "documents",
    "data.sequence_length": 48,
    "ledger": {"measure": False, "dry_run": False},
    "logging.tensorboard": False,
    "evaluation.every": 0,
}
DRAWN = {**PACKED, "data.balance_rows": False}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "{"warp and weft " * (1 + at * 7 % 5)}{at}"}}\n' for at in range(160)))
    return path


def curve(run: Path) -> list[tuple[float, float, int]]:
    return [(line["loss"], line["grad_norm"], line["tokens"]) for line in metrics(run)]


def test_the_curve_is_that_of_the_drawn_order_to_rounding(tmp_path: Path, texts: Path) -> None:
    train_here(tmp_path / "drawn", texts, DRAWN)
    train_here(tmp_path / "balanced", texts, PACKED)
    drawn, balanced = curve(tmp_path / "drawn"), curve(tmp_path / "balanced")
    assert [tokens for *_, tokens in drawn] == [tokens for *_, tokens in balanced]
    for before, after in zip(drawn, balanced, strict=True):
        assert after == pytest.approx(before, rel=1e-5)
    assert balanced != drawn  # another order of sums


def test_a_run_of_the_drawn_order_is_resumed_in_the_balanced_one(tmp_path: Path, texts: Path) -> None:
    """As runs that were begun before the key: every sample of the remaining steps, none twice."""
    train_here(tmp_path / "whole", texts, DRAWN)
    with stop_after(3):
        train_here(tmp_path / "parts", texts, {**DRAWN, "checkpoint.every": 1})
    named = ("data.balance_rows",)
    train_here(tmp_path / "parts", texts, {**PACKED, "checkpoint.every": 1}, resume=True, may_change=named)
    for before, after in zip(curve(tmp_path / "whole"), curve(tmp_path / "parts"), strict=True):
        assert after == pytest.approx(before, rel=1e-5)
