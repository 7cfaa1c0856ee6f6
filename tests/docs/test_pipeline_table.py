"""The table of schedules in the pipeline guide says what `schedule.summary` computes."""

from __future__ import annotations

import re

import pytest
from blocks import ROOT

from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.schedule import NAMES, summary

TEXT = (ROOT / "docs" / "guides" / "pipeline.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (\d)[^|]*\| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_what_the_simulation_says(row: tuple[str, ...]) -> None:
    name, virtual_stages, *figures = row
    found = [summary(name, 4, microbatches, int(virtual_stages)) for microbatches in (8, 16)]
    shares = [f"{100 * one.bubble_share:.1f}" for one in found]
    held = [f"{max(one.in_flight.by_rank_until_weight) / int(virtual_stages):g}" for one in found]
    assert [*shares, *held] == figures


def test_every_schedule_that_is_trained_has_a_row() -> None:
    trained = [name for name in NAMES if not name.startswith("pipedream")]
    assert [row[0] for row in ROWS] == trained
    for name in trained:
        require_executable(Plan.from_tables({"mesh": {"pp": 2}, "pipeline": {"schedule": name}}))
