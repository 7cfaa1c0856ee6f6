"""Each generator's smallest telling case, written out by hand from its paper's figure."""

from __future__ import annotations

import pytest

from weft.schedule import generate

BY_HAND = {
    ("naive", 2, 2, 1): ("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
    ("gpipe", 2, 3, 1): ("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"),
    ("1f1b", 3, 4, 1): (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ),
    ("interleaved_1f1b", 2, 2, 2): (
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ),
    ("looped_bfs", 2, 2, 2): (
        "0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0",
        "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0",
    ),
    ("zero_bubble", 2, 3, 1): (
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ),
    ("zbv", 2, 3, 2): (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ),
    ("dualpipev", 1, 2, 2): ("0F0 1F0 0F1 1B0 1F1 0B0 1B1 0I1 0W1",),
    ("pipedream", 2, 3, 1): (
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ),
    ("pipedream_2bw", 2, 2, 1): (
        "0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3",
        "1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3",
    ),
}
STEPS = {"pipedream": 1, "pipedream_2bw": 2}


@pytest.mark.parametrize("case", BY_HAND, ids=lambda case: case[0])
def test_generator_writes_what_the_figure_shows(case: tuple[str, int, int, int]) -> None:
    name, p, m, v = case
    schedule = generate(name, num_ranks=p, num_microbatches=m, virtual_stages=v, num_steps=STEPS.get(name))
    assert tuple(" ".join(map(str, actions)) for actions in schedule.ranks) == BY_HAND[case]
