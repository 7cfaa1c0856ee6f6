"""The picture is well-formed, self-contained, true to time, and has a bar for every action that takes time."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from asked import Asked, requests
from hypothesis import given, settings

from weft.schedule import StageCosts, draw_svg, generate, simulate

SPACE = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(svg)
    found = {}
    for rect in root.iter(f"{SPACE}rect"):
        title = rect.find(f"{SPACE}title")
        if title is not None and title.text:
            found[title.text.split(",")[0]] = rect
    return found


@settings(max_examples=25)
@given(requests())
def test_every_action_has_its_bar(asked: Asked) -> None:
    timeline = simulate(asked.schedule)
    drawn = bars(draw_svg(timeline))
    assert set(drawn) == {str(e.action) for e in timeline.events() if e.end_s > e.start_s}


def test_widths_and_places_are_true_to_time() -> None:
    costs = StageCosts.uniform(2, forward_s=1, backward_input_s=3, backward_weight_s=2)
    drawn = bars(draw_svg(simulate(generate("gpipe", num_ranks=2, num_microbatches=1), costs)))
    unit = float(drawn["0F0"].attrib["width"])
    assert float(drawn["1B0"].attrib["width"]) == 5 * unit
    assert float(drawn["0B0"].attrib["x"]) - float(drawn["0F0"].attrib["x"]) == 7 * unit
    assert drawn["0F0"].attrib["y"] != drawn["1F0"].attrib["y"]


def test_a_measured_clock_is_drawn_from_its_first_action() -> None:
    timeline = simulate(generate("1f1b", num_ranks=2, num_microbatches=2))
    late = replace(
        timeline,
        starts=tuple(tuple(time + 4096 for time in own) for own in timeline.starts),
        ends=tuple(tuple(time + 4096 for time in own) for own in timeline.ends),
    )
    assert draw_svg(late) == draw_svg(timeline)


def test_nothing_is_fetched_from_elsewhere() -> None:
    svg = draw_svg(simulate(generate("dualpipev", num_ranks=2, num_microbatches=4, virtual_stages=2)))
    without_namespace = svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not any(word in without_namespace for word in ("http", "url(", "@import", "<script", "href"))
