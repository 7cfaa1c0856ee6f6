"""The pipeline's benchmarks at small sizes: torch's own 1F1B computes the same bits, figures come from real walks."""

from __future__ import annotations

import argparse

import pytest
from benchmark_folder import benchmarks_importable

with benchmarks_importable():
    import pipeline_bubble
    import pipeline_memory
    import pipeline_overhead


@pytest.mark.slow
def test_torch_s_pipeline_gives_the_same_bits() -> None:
    with benchmarks_importable():  # by the ranks too
        rows = pipeline_overhead.judge(2, rounds=2, small=True)
    assert [row["what"] for row in rows] == ["forwards and backwards", "whole step"]
    for row in rows:
        assert row["gradient"] == 0
        assert row["torch"] > 0
        assert row["low"] <= row["high"]
    assert rows[0]["weft"] < rows[1]["weft"]
    page = pipeline_overhead.result_page(rows, argparse.Namespace(rounds=2, small=True))
    assert "| 2 | whole step |" in page
    assert "in no bit" in page


def test_two_sides_that_differ_are_no_peers() -> None:
    import torch

    ours = {"a": torch.ones(3), "b": torch.zeros(2)}
    with pytest.raises(RuntimeError, match="on one side only"):
        pipeline_overhead.worst_difference(ours, {"a": torch.ones(3)})
    assert pipeline_overhead.worst_difference({"a": torch.ones(3)}, {"a": 2 * torch.ones(3)}) == pytest.approx(0.5)


@pytest.mark.slow
def test_the_bubble_is_told_by_schedule_and_by_cause() -> None:
    names = ["1f1b", "interleaved_1f1b", "zbv"]
    with benchmarks_importable():
        found = pipeline_bubble.run_ranks(pipeline_bubble.measure, 2, names, 2, True, True, timeout_s=120)
    rows = [pipeline_bubble.medians_of(name, found) for name in names]
    for row in rows:
        assert 0 < row["simulated"] < 1
        assert 0 < row["measured"] < 1
        assert row["between"] <= row["worst"]
        assert 0 <= row["core"] <= 1
        assert min(row["costs"]["forward_s"]) > 0
    # 1F1B cuts no backward, ZBV cuts every one
    assert [any(row["costs"]["backward_weight_s"]) for row in rows] == [False, False, True]
    page = pipeline_bubble.result_page(rows, argparse.Namespace(repeats=2, small=True, no_pin=False))
    assert "| 1f1b | not measured: 2 cores |" in page


def test_equal_costs_have_the_textbook_s_bubble_on_four_ranks() -> None:
    ones = {"forward_s": [1.0] * 4, "backward_input_s": [2.0] * 4, "backward_weight_s": [0.0] * 4, "send_s": [0.0] * 3}
    rows = [{"schedule": name, "costs": {**ones, "update_s": [0.0] * 4}} for name in ("1f1b", "interleaved_1f1b")]
    told = {row[0]: row[2:] for row in pipeline_bubble.four_rank_rows(rows)}
    assert told == {"1f1b": ["27.3%", "27.3%"], "interleaved_1f1b": ["15.8%", "15.8%"]}


@pytest.mark.slow
def test_1f1b_holds_37_5_percent_less_than_f_then_b() -> None:
    with benchmarks_importable():
        found = pipeline_memory.compare(4, 4, with_ranks=True)["found"]
    assert found["held"] == found["scheduled"] == {"gpipe": [4, 4, 4, 4], "1f1b": [4, 3, 2, 1]}
    for what in ("dry", "bytes"):
        saved = 1 - sum(found[what]["1f1b"]) / sum(found[what]["gpipe"])
        assert saved == pytest.approx(pipeline_memory.PUBLISHED, abs=0.01)
