"""The record of a pipeline: which step is shown, what is told of it, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.schedule import Schedule, StageCosts, Timeline, generate, simulate
from weft.train.pipeline.record import PIPELINE, TRACE, PipelineRecord, WatchedStep, write_pipeline

SCHEDULE = generate("1f1b", num_ranks=2, num_microbatches=4)


def watched(step: int, *, forward_s: float, is_disturbed: bool = False) -> WatchedStep:
    """On a clock that does not begin at 0; every rank turns to its next action at once."""
    costs = StageCosts.uniform(2, forward_s=forward_s, backward_input_s=2, backward_weight_s=0, send_s=0.5)
    found = simulate(SCHEDULE, costs)
    starts, ends = (tuple(tuple(at + 100 for at in row) for row in rows) for rows in (found.starts, found.ends))
    asked = tuple((100.0, *row[:-1]) for row in ends)
    timeline = Timeline(schedule=SCHEDULE, starts=starts, ends=ends)
    return WatchedStep(step=step, timeline=timeline, asked=asked, is_disturbed=is_disturbed)


def record(*steps: WatchedStep) -> PipelineRecord:
    return PipelineRecord(steps=steps, most_in_flight=(2, 1), ranks=(0, 2), is_one_clock=True)


SLOW = watched(1, forward_s=9, is_disturbed=True)


def test_the_median_of_the_undisturbed_steps_is_shown() -> None:
    calm = [watched(2, forward_s=3), watched(3, forward_s=1), watched(4, forward_s=2)]
    assert record(SLOW, *calm).chosen.step == 4
    assert record(watched(1, forward_s=0.1, is_disturbed=True), *calm).chosen.step == 4
    assert record(SLOW).chosen.step == 1  # better than none


def test_the_figures_of_a_run_that_went_as_simulated() -> None:
    memory = [{"rank": 0, "step_peak_bytes": 9, "terms": {"activations": 5}}, {"rank": 2, "terms": {"activations": 7}}]
    figures = record(SLOW, watched(2, forward_s=1)).figures(memory)
    assert (figures["schedule"], figures["step"], figures["is_disturbed"]) == ("1f1b", 2, False)
    assert figures["bubble_share"]["measured"] == pytest.approx(figures["bubble_share"]["simulated"])
    assert figures["in_flight"] == {"measured": [2, 1], "scheduled": [2, 1]}
    assert figures["activation_bytes"] == [5, None]  # rank 2's peak was not measured
    assert figures["gaps_s"][1]["idle"] > 0


def test_a_wait_that_the_order_does_not_explain_is_in_the_measured_share_alone() -> None:
    calm = watched(2, forward_s=1)
    late = [tuple(at + 3 * (index > 4) for index, at in enumerate(row)) for row in calm.timeline.starts]
    ends = [tuple(at + 3 * (index > 4) for index, at in enumerate(row)) for row in calm.timeline.ends]
    timeline = Timeline(schedule=SCHEDULE, starts=tuple(late), ends=tuple(ends))
    asked = tuple((100.0, *row[:-1]) for row in ends)
    stalled = WatchedStep(step=2, timeline=timeline, asked=asked, is_disturbed=False)
    share = record(SLOW, stalled).figures()["bubble_share"]
    assert share["measured"] > share["simulated"] + 0.05


def test_the_files_and_that_old_ones_go(tmp_path: Path) -> None:
    write_pipeline(tmp_path, record(SLOW, watched(2, forward_s=1)), [])
    written = json.loads((tmp_path / PIPELINE).read_text(encoding="utf-8"))
    assert Schedule.parse(written["order"]) == SCHEDULE
    assert written["measured"]["starts"][0][0] == 0  # from the first action on
    assert written["measured"]["starts"] == written["simulated"]["starts"]
    assert [step["is_disturbed"] for step in written["steps"]] == [True, False]
    trace = json.loads((tmp_path / TRACE).read_text(encoding="utf-8"))
    processes = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert processes == {0: "measured, step 2", 1: "simulated with the measured costs"}
    assert {event["cat"] for event in trace if event["ph"] == "X"} == {"forward", "backward", "idle", "receive"}
    write_pipeline(tmp_path, None, [])
    assert not list(tmp_path.iterdir())
