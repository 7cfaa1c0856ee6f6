"""The pipeline's section: both timelines on one scale, every stretch in its colour; old runs and broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.report import pipeline as drawing
from weft.report import write_report
from weft.report.pipeline import bars_of, draw_pipeline, read_run
from weft.schedule import StageCosts, Timeline, generate, simulate

Write = Callable[..., Path]


def times(timeline: Timeline) -> dict[str, Any]:
    return {
        "starts": [list(row) for row in timeline.starts],
        "ends": [list(row) for row in timeline.ends],
        "bubble_share_by_rank": list(timeline.bubble_share_by_rank),
    }


def made(name: str = "zbv", *, microbatches: int = 4, **fields: Any) -> dict[str, Any]:
    """pipeline.json of a run that was slower than it is simulated."""
    virtual = 2 if name == "zbv" else 1
    schedule = generate(name, num_ranks=2, num_microbatches=microbatches, virtual_stages=virtual)
    measured, simulated = (
        simulate(schedule, StageCosts.uniform(2 * virtual, forward_s=forward_s, send_s=0.125)) for forward_s in (1.5, 1)
    )
    return {
        "version": 1,
        "order": schedule.to_text(),
        "step": 5,
        "ranks": [0, 4],
        "clock": "one host",
        "in_flight": {"measured": [4, 3, 2, 1], "scheduled": [4, 3, 2, 1]},
        "gaps_s": [{"idle": 1.0, "receive": 0.5, "send": 0.25}] * 2,
        "activation_bytes": [2**20, None],
        "costs": {"forward_s": [1, 2, 3, 4], "backward_input_s": [1, 2, 3, 4], "backward_weight_s": [1, 1, 1, 1]},
        "measured": {**times(measured), "asked": [[0.0, *row[:-1]] for row in measured.ends]},
        "simulated": times(simulated),
        **fields,
    }


def test_the_bars_of_a_rank_fill_its_time_and_do_not_overlap() -> None:
    for side in ("measured", "simulated"):
        ran = read_run(made(), side)
        assert ran is not None
        for rank in range(2):
            bars = sorted((bar.start_s, bar.end_s) for bar in bars_of(ran) if bar.rank == rank)
            assert bars[0][0] == 0
            assert bars[-1][1] == pytest.approx(ran.timeline.makespan_s)
            assert [end for _, end in bars[:-1]] == pytest.approx([start for start, _ in bars[1:]])


def test_both_timelines_are_drawn_on_one_scale() -> None:
    measured, simulated = draw_pipeline(made())
    assert measured.title == "zbv: step 5 as it ran"
    ranges = [chart.as_json()["layout"]["xaxis"]["range"] for chart in (measured, simulated)]
    assert ranges[0] == ranges[1] == [0, max(max(row) for row in made()["measured"]["ends"])]
    traces = {trace["name"]: trace for trace in measured.as_json()["data"]}
    assert set(traces) == {"forward", "backward input", "backward weight", "receive", "idle"}
    assert len(traces["forward"]["x"]) == 16
    assert set(traces["forward"]["y"]) == {"rank 0", "rank 4"}
    assert traces["forward"]["text"][0] == "0a"
    assert [entry.words for entry in measured.legend] == list(traces)


def test_the_page_has_the_section_and_its_tables(whole_folder: Write, page_of: Any) -> None:
    folder = whole_folder()
    (folder / "pipeline.json").write_text(json.dumps(made()), encoding="utf-8")
    page = page_of(write_report(folder))
    assert {"pipeline-measured", "pipeline-simulated"} <= set(page.figures())
    assert "Where each rank's time went" in page.text
    assert "1.0 MiB" in page.text
    assert ("a", "href", "#pipeline") in page.attributes


def test_a_run_without_a_pipeline_has_no_such_section(whole_folder: Write, page_of: Any) -> None:
    page = page_of(write_report(whole_folder()))
    assert ("section", "id", "pipeline") not in page.attributes
    assert ("a", "href", "#pipeline") not in page.attributes


@pytest.mark.parametrize(
    "broken", ["{", "{}", "[]", json.dumps(made(order="no schedule")), json.dumps(made(measured={"starts": [[1]]}))]
)
def test_a_broken_file_never_breaks_the_page(broken: str, whole_folder: Write, page_of: Any) -> None:
    folder = whole_folder()
    (folder / "pipeline.json").write_text(broken, encoding="utf-8")
    assert "pipeline-measured" not in page_of(write_report(folder)).figures()


def test_what_disturbed_the_step_is_said() -> None:
    [measured, _] = draw_pipeline(made(is_disturbed=True, clock="hosts compared at the start"))
    assert "slowed down by starting or measuring" in measured.caption
    assert "Clocks of several hosts" in measured.caption


def test_a_huge_pipeline_is_cut_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MAX_BARS", 60)
    [measured, _] = draw_pipeline(made("1f1b", microbatches=20))
    assert "The first 1 of 2 ranks are drawn." in measured.caption
    assert {place for trace in measured.as_json()["data"] for place in trace["y"]} == {"rank 0"}
