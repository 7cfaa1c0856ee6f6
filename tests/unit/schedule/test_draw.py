"""The terminal grid: exact text of small cases, and nothing lost at any cost."""

from __future__ import annotations

import re
from dataclasses import replace

from asked import Asked, requests
from hypothesis import given, settings

from weft.schedule import Kind, StageCosts, draw_grid, generate, simulate


def test_the_grid_of_1f1b() -> None:
    assert draw_grid(simulate(generate("1f1b", num_ranks=3, num_microbatches=3))) == (
        "rank 0 F0 F1 F2 ·  ·  ·  ·  B0 ── ·  B1 ── ·  B2 ──\n"
        "rank 1 ·  F0 F1 ·  ·  B0 ── F2 B1 ── ·  B2 ── ·  ·\n"
        "rank 2 ·  ·  F0 B0 ── F1 B1 ── F2 B2 ── ·  ·  ·  ·\n"
        "\n"
        "1f1b: F forward, B backward, · idle (40.0% of the time of all ranks)\n"
    )


def test_several_stages_a_rank_are_lettered() -> None:
    grid = draw_grid(simulate(generate("zbv", num_ranks=1, num_microbatches=1, virtual_stages=2)))
    assert grid.splitlines()[0] == "rank 0 F0a F0b I0b W0b I0a W0a"
    assert "I backward input, W backward weight" in grid


def test_a_narrow_terminal_folds_the_grid() -> None:
    timeline = simulate(generate("1f1b", num_ranks=2, num_microbatches=8))
    folded = draw_grid(timeline, columns=40)
    assert max(map(len, folded.splitlines()[:-1])) <= 40
    assert len(re.findall(r"[FB]\d", folded.split("1f1b")[0])) == 32


def test_one_tiny_action_does_not_stretch_the_drawing() -> None:
    costs = replace(StageCosts.uniform(2), forward_s=(1e-6, 1), update_s=(1e-9, 0))
    grid = draw_grid(simulate(generate("pipedream", num_ranks=2, num_microbatches=2, num_steps=2), costs))
    assert max(map(len, grid.splitlines())) < 600 * 3
    assert len(re.findall(r"F\d", grid)) == 8


@settings(max_examples=30)
@given(requests())
def test_every_action_that_takes_time_is_drawn_once(asked: Asked) -> None:
    schedule = asked.schedule
    costs = StageCosts.uniform(asked.p * asked.v, forward_s=1.3, backward_input_s=0.9, backward_weight_s=0.4)
    rows = draw_grid(simulate(schedule, costs)).splitlines()[: asked.p]
    for row, actions in zip(rows, schedule.ranks, strict=True):
        drawn = re.findall(r"([FBIW])(\d+)", row.removeprefix("rank "))
        assert drawn == [(a.kind.value, str(a.microbatch)) for a in actions if a.kind is not Kind.U]
