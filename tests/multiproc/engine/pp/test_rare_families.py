"""Families whose forward is unlike Llama's, each in a way of its own: two ranks against one process, and the page."""

from __future__ import annotations

import pytest
from benchmark_folder import FOLDER, benchmarks_importable

with benchmarks_importable():
    import pipeline_families
    import tiny_families

# Bloom gives tuples, Bamba pairs; Mllama has blocks that text alone does not call; BigBird puts other attention in
# place as it runs; Blenderbot's table of positions is told a shape; Gemma 3n hands every block a part of a second
# table, which only the first stage has
RIGHT = ("bloom", "mllama", "bamba", "big_bird", "blenderbot")
REFUSED = ("gemma3n_text", "hrm_text", "ctrl")
PAGE = FOLDER.parent / "docs" / "reference" / "pipeline-families.md"


@pytest.mark.parametrize(
    "model_types", [(*RIGHT[:2], *REFUSED[:1]), pytest.param((*RIGHT[2:], *REFUSED[1:]), marks=pytest.mark.slow)]
)
def test_two_ranks_are_one_process_or_refuse_alike(model_types: tuple[str, ...]) -> None:
    with benchmarks_importable():  # by the ranks too
        rows = pipeline_families.judge_types(list(model_types), degree=2)
    refused, right = PAGE.read_text(encoding="utf-8").split("## Right")
    for name, row in rows.items():
        if name in RIGHT:
            assert (row["verdict"], row["why"]) == ("right", "")
            assert name in right.strip().split(", ")
        else:
            assert (row["verdict"], row["when"]) == ("refused", "before training")
            assert f"| {name} | {tiny_families.cell(row['why'])} |" in refused
