"""The pipeline's section: both timelines on one scale, every stretch in its colour; old runs and broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from weft.report import write_report
from weft.report.training import pipeline as drawing
from weft.report.training.pipeline import draw_pipeline
from weft.schedule import StageCosts, Timeline, generate, simulate

Write = Callable[..., Path]
SPACE = "{http://www.w3.org/2000/svg}"


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


def rects(figure: str, rank: int) -> list[tuple[str, float, float]]:
    """(hover text, left, right) of the bars of a rank, waits included, from left to right."""
    svg = ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")])
    found = []
    for rect in svg.iter(f"{SPACE}rect"):
        title = rect.find(f"{SPACE}title")
        if title is not None and title.text and f"rank {rank}:" in title.text:
            left = float(rect.attrib["x"])
            found.append((title.text, left, left + float(rect.attrib["width"])))
    return sorted(found, key=lambda bar: bar[1])


def test_the_bars_of_a_rank_fill_its_time_and_do_not_overlap() -> None:
    for side in range(2):
        bars = [rects(draw_pipeline(made())[side], rank) for rank in (0, 4)]
        for own in bars:
            assert [right for _, _, right in own[:-1]] == pytest.approx([left for _, left, _ in own[1:]], abs=0.11)
        assert bars[0][0][1] == bars[1][0][1]
        assert bars[0][-1][2] == pytest.approx(bars[1][-1][2], abs=0.11)


def test_both_timelines_are_drawn_on_one_scale() -> None:
    measured, simulated = draw_pipeline(made())
    assert "zbv: step 5 as it ran" in measured
    forwards = [[right - left for text, left, right in rects(side, 4) if "F" in text] for side in (measured, simulated)]
    assert len(forwards[0]) == len(forwards[1]) == 8
    assert forwards[0] == pytest.approx([1.5 * width for width in forwards[1]], abs=0.3)
    for words in ("forward", "backward input", "backward weight", "receive", "idle"):
        assert f">{words}</text>" in measured
    assert ">update</text>" not in measured
    assert "0F0, stage 0, micro-batch 0, rank 0: 1.5s from 0ms on" in measured
    assert ">0a</text>" in measured


def test_the_page_has_the_section_and_its_tables(whole_folder: Write, page_of: Any) -> None:
    folder = whole_folder()
    (folder / "pipeline.json").write_text(json.dumps(made()), encoding="utf-8")
    page = page_of(write_report(folder))
    assert page.tags["svg"] == 2
    assert "zbv: step 5 as it ran" in page.text
    assert "The same, simulated" in page.text
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
    assert page_of(write_report(folder)).tags["svg"] == 0


def test_what_disturbed_the_step_is_said() -> None:
    [measured, _] = draw_pipeline(made(is_disturbed=True, clock="hosts compared at the start"))
    assert "slowed down by starting or measuring" in measured
    assert "Clocks of several hosts" in measured


def test_a_huge_pipeline_is_cut_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "MAX_BARS", 60)
    [measured, _] = draw_pipeline(made("1f1b", microbatches=20))
    assert "The first 1 of 2 ranks are drawn." in measured
    assert rects(measured, 0)
    assert not rects(measured, 4)
