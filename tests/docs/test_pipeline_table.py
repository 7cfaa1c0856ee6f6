"""The table of schedules in the pipeline guide has the figures of the simulation."""

from __future__ import annotations

import re

import pytest
from blocks import ROOT

from weft.core.executable import require_executable
from weft.core.plan import Plan
from weft.schedule import NAMES, count_in_flight, generate, simulate

TEXT = (ROOT / "docs" / "guides" / "pipeline.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (\d)[^|]*\| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_what_the_simulation_says(row: tuple[str, ...]) -> None:
    name, virtual_stages, *figures = row
    stages = int(virtual_stages)
    found = [generate(name, num_ranks=4, num_microbatches=count, virtual_stages=stages) for count in (8, 16)]
    shares = [f"{100 * simulate(one).bubble_share:.1f}" for one in found]
    held = [f"{max(count_in_flight(one).by_rank_until_weight) / stages:g}" for one in found]
    assert [*shares, *held] == figures


def test_every_schedule_that_is_trained_has_a_row() -> None:
    trained = [name for name in NAMES if not name.startswith("pipedream")]
    assert [row[0] for row in ROWS] == trained
    for name in trained:
        require_executable(Plan.from_tables({"mesh": {"pp": 2}, "pipeline": {"schedule": name}}))
