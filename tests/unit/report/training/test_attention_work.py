"""The bars of attention work: equal for zig-zag, uneven for contiguous parts, none where ranks have whole rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.report.folder import TrainingFolder, read_folder
from weft.report.training.attention_work import draw_attention_work


@pytest.fixture
def folder(whole_folder: Callable[[], Path]) -> TrainingFolder:
    return read_folder(whole_folder())


def with_plan(folder: TrainingFolder, **tables: Any) -> TrainingFolder:
    return replace(folder, plan=tables, run={"data": {"sequence_length": 4096}})


def test_ranks_are_drawn_for_both_splits(folder: TrainingFolder) -> None:
    chart = draw_attention_work(with_plan(folder, mesh={"cp": 2}, context_parallel={"attention": "ring"}))
    assert chart is not None
    zigzag, contiguous = (list(trace["x"]) for trace in chart.as_json()["data"])
    assert zigzag == [1.0, 1.0]
    assert contiguous == pytest.approx([0.5, 1.5], rel=1e-3)
    assert "1.000 with zigzag, 1.500 with contiguous" in chart.caption


def test_ranks_that_exchange_heads_share_their_work(folder: TrainingFolder) -> None:
    policy = {"attention": "ring", "ulysses": 2}
    chart = draw_attention_work(with_plan(folder, mesh={"cp": 4}, context_parallel=policy))
    assert chart is not None
    zigzag, contiguous = (list(trace["x"]) for trace in chart.as_json()["data"])
    assert zigzag == [1.0] * 4
    assert contiguous == pytest.approx([0.5, 0.5, 1.5, 1.5], rel=1e-3)


def test_nothing_is_drawn_where_work_is_equal_anyway(folder: TrainingFolder) -> None:
    assert draw_attention_work(with_plan(folder, mesh={"cp": 1})) is None
    assert draw_attention_work(with_plan(folder, mesh={"cp": 2}, context_parallel={"attention": "ulysses"})) is None
