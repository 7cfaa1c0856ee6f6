"""Curves and bars: what is drawn, what is marked, and what is honestly left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.core.records import StepRecord
from weft.core.terms import MemoryTerm
from weft.report.chart import Chart
from weft.report.curves import draw_curves, draw_grad_norm, draw_loss, draw_loss_scale, draw_throughput, resume_steps
from weft.report.folder import TrainingFolder, read_folder
from weft.report.training.costs import MAX_RANKS, draw_costs, draw_memory, draw_sources, draw_time, term_names

Write = Callable[..., Path]


def records(*losses: float, **fields: Any) -> list[StepRecord]:
    base = {"grad_norm": 1.0, "tokens": 8, "learning_rate": 1e-3, **fields}
    return [StepRecord(step=index, loss=loss, **base) for index, loss in enumerate(losses, start=1)]


def drawn(chart: Chart | None) -> Chart:
    assert chart is not None
    return chart


def with_ledger(write: Write, ledger: dict[str, Any]) -> TrainingFolder:
    return read_folder(write(num_steps=2, ledger=ledger))


def test_a_loss_that_is_not_finite_leaves_a_gap_and_a_sentence() -> None:
    chart = drawn(draw_loss(records(3.0, math.nan, 2.0)))
    assert list(chart.as_json()["data"][0]["x"]) == [1, 3]
    assert "The loss was not finite in 1 step." in chart.caption
    assert "No evaluation was made." in chart.caption


def test_no_finite_value_means_no_chart() -> None:
    steps = records(math.nan, math.inf, grad_norm=math.nan)
    assert draw_loss(steps) is None
    assert draw_grad_norm(steps) is None
    assert draw_throughput(steps) is None
    assert draw_loss([]) is None


def test_a_resume_is_marked_on_the_loss(whole_folder: Write, ledger_of: Any, steps_of: Any) -> None:
    ledger = ledger_of()
    ledger["run"]["resumed_from"] = 7
    folder = read_folder(whole_folder(steps=steps_of(9) + steps_of(12)[4:], ledger=ledger))
    assert resume_steps(folder) == [4, 7]
    shapes = draw_curves(folder)[0].as_json()["layout"]["shapes"]
    assert [shape["x0"] for shape in shapes] == [4, 7]


def test_long_curves_are_thinned_but_keep_their_spike() -> None:
    losses = [2.0] * 20_000
    losses[12_345] = 40.0
    ys = drawn(draw_loss(records(*losses))).as_json()["data"][0]["y"]
    assert len(ys) < 2_100
    assert max(ys) == 40.0


@pytest.mark.parametrize(("norms", "kind"), [((1.0, 2.0), None), ((0.1, 50.0), "log"), ((0.0, 50.0), None)])
def test_the_gradient_norm_takes_a_log_axis_where_that_helps(norms: tuple[float, ...], kind: str | None) -> None:
    steps = [records(1.0, grad_norm=norm)[0] for norm in norms]
    chart = drawn(draw_grad_norm(steps))
    assert chart.as_json()["layout"]["yaxis"].get("type") == kind
    assert ("Log scale." in chart.caption) == (kind == "log")


def test_the_loss_scale_is_drawn_for_fp16_alone() -> None:
    assert draw_loss_scale(records(1.0, 1.0)) is None
    chart = drawn(draw_loss_scale(records(1.0, 1.0, loss_scale=65_536.0, skipped=True)))
    assert "2 steps skipped" in chart.caption


def test_memory_is_stacked_by_term_in_the_order_of_the_terms(whole_folder: Write, ledger_of: Any) -> None:
    ledger = ledger_of(num_ranks=2)
    chart = drawn(draw_memory(with_ledger(whole_folder, ledger)))
    data = chart.as_json()["data"]
    assert [trace["name"] for trace in data] == ["weights", "gradients", "optimizer state", "buffers", "other"]
    totals = [sum(trace["x"][rank] for trace in data) * 2**20 for rank in range(2)]
    assert totals == pytest.approx([rank["peak_bytes"] for rank in ledger["memory"]["ranks"]])
    assert [entry.words for entry in chart.legend] == [trace["name"] for trace in data]


def test_many_ranks_are_cut_to_the_largest_peaks_and_it_says_so(whole_folder: Write, ledger_of: Any) -> None:
    ledger = ledger_of(num_ranks=500)
    ledger["memory"]["ranks"][321]["peak_bytes"] = 9 * 2**30
    chart = drawn(draw_memory(with_ledger(whole_folder, ledger)))
    ranks = chart.as_json()["data"][0]["x"]
    assert len(ranks) == MAX_RANKS
    assert "321" in ranks
    assert "the 64 ranks with the largest peaks are drawn" in chart.caption


def test_time_shows_the_prediction_where_there_is_one(whole_folder: Write, ledger_of: Any) -> None:
    ledger = ledger_of()
    measured_alone = drawn(draw_time(with_ledger(whole_folder, ledger)))
    assert list(measured_alone.as_json()["data"][0]["y"]) == ["measured"]
    assert "The largest part is forward backward." in measured_alone.caption
    ledger["time"]["terms"]["data"]["predicted"] = 0.005
    both = drawn(draw_time(with_ledger(whole_folder, ledger)))
    assert list(both.as_json()["data"][0]["y"]) == ["measured", "predicted"]


def test_forward_and_backward_are_not_counted_twice(whole_folder: Write, ledger_of: Any) -> None:
    ledger = ledger_of()
    for term, measured, predicted in (
        ("forward", 0.1, None),
        ("backward", 0.211, None),
        ("forward_backward", 0.311, 0.3),
    ):
        ledger["time"]["terms"][term] = {"measured": measured, "predicted": predicted}
    data = drawn(draw_time(with_ledger(whole_folder, ledger))).as_json()["data"]
    seconds = {trace["name"]: list(trace["x"]) for trace in data}
    assert (seconds["forward"], seconds["backward"]) == ([0.1, 0.0], [0.211, 0.0])
    assert seconds["forward backward"] == [0.0, 0.3]


def test_predicted_dry_run_and_measured_stand_side_by_side(whole_folder: Write, ledger_of: Any) -> None:
    ledger = ledger_of()
    sides = {"predicted": 2**20, "dry_run": 2**21, "measured": 2**22}
    ledger["memory"]["terms"] = {"weights": sides, "framework": {"predicted": 2**30, "measured": None}}
    assert draw_sources(with_ledger(whole_folder, ledger)) is None  # without totals there is nothing to compare
    ledger["memory"]["total"] = sides
    chart = drawn(draw_sources(with_ledger(whole_folder, ledger)))
    [trace] = chart.as_json()["data"]
    assert (list(trace["y"]), list(trace["x"])) == (["predicted", "dry run", "measured"], [1.0, 2.0, 4.0])
    assert "predicted 1.0 MiB, dry run 2.0 MiB, measured 4.0 MiB" in chart.caption


def test_without_terms_there_are_no_bars(whole_folder: Write) -> None:
    assert draw_costs(with_ledger(whole_folder, {"memory": {"ranks": []}, "time": {"terms": {"data": None}}})) == []


def test_an_unknown_term_comes_last_and_is_not_dropped() -> None:
    assert term_names(MemoryTerm, ["aardvark", "other", "weights"]) == ["weights", "other", "aardvark"]
