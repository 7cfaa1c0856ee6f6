"""The pipeline section: the measured timeline, the simulated one below it on the same scale, tables by rank and stage.

The simulation takes the measured mean cost of each stage, so the two differ in waiting, not in work. One row per rank:
forward, backward (or its input and weight parts), receive (a message is in transit), send, idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weft.core.errors import InputError
from weft.core.units import format_bytes, format_seconds
from weft.report.chart import figure_box
from weft.report.fields import number, table
from weft.report.markup import NOTHING, Markup, absent, grid, join, shown, tag, text
from weft.schedule import Gap, Schedule, Timeline, draw_svg, gaps
from weft.schedule.svg import pixels_per_s

MAX_BARS = 12_000
MIN_WIDTH = 960  # pixels
NOTE = (
    "Bubble is the share of a rank's time without compute, between the pipeline's first action and its last. "
    "pipeline_trace.json holds both timelines for ui.perfetto.dev."
)


class Recorded(NamedTuple):
    """A timeline and the waits between its actions."""

    timeline: Timeline
    gaps: list[Gap]


def pipeline_section(pipeline: dict[str, Any]) -> Markup:
    """Nothing for a run without a pipeline."""
    if not pipeline:
        return NOTHING
    charts = draw_pipeline(pipeline)
    if not charts:
        return absent("pipeline.json does not hold the timeline of a schedule.")
    schedule = Schedule.parse(str(pipeline["order"]))
    note = tag("p", text(NOTE), class_="muted")
    drawn = tag("div", *charts, class_="charts")
    return join([drawn, note, _rank_table(pipeline, schedule), _stage_table(pipeline, schedule)])


def draw_pipeline(pipeline: dict[str, Any]) -> list[Markup]:
    """The measured and the simulated timeline as figures; none where the file does not hold both."""
    measured, simulated = read_timeline(pipeline, "measured"), read_timeline(pipeline, "simulated")
    if measured is None or simulated is None:
        return []
    return [
        _figure(pipeline, measured, measured, simulated, *_measured_words(pipeline, measured.timeline)),
        _figure(
            pipeline, simulated, measured, simulated, "The same, simulated", _simulated_caption(simulated.timeline)
        ),
    ]


def read_timeline(pipeline: dict[str, Any], side: str) -> Recorded | None:
    """The "measured" or "simulated" timeline; None where its times do not match the schedule."""
    times = table(pipeline, side)
    try:
        schedule = Schedule.parse(str(pipeline.get("order", "")))
        starts, ends = _matrix(times["starts"], schedule), _matrix(times["ends"], schedule)
        asked = _matrix(times["asked"], schedule) if "asked" in times else tuple((0.0, *own[:-1]) for own in ends)
    except (InputError, KeyError, TypeError, ValueError):
        return None
    timeline = Timeline(schedule=schedule, starts=starts, ends=ends)
    return Recorded(timeline, list(gaps(timeline, asked))) if timeline.makespan_s > 0 else None


def _figure(
    pipeline: dict[str, Any], drawn: Recorded, measured: Recorded, simulated: Recorded, title: str, caption: str
) -> Markup:
    schedule = drawn.timeline.schedule
    end_s = max(measured.timeline.makespan_s, simulated.timeline.makespan_s)
    names = [f"rank {rank}" for rank in _ranks(pipeline, schedule)]
    num_bars = len(drawn.gaps) + sum(map(len, schedule.ranks))
    if num_bars > MAX_BARS:
        num_drawn = max(1, len(names) * MAX_BARS // num_bars)
        caption += f" The first {num_drawn} of {len(names)} ranks are drawn."
        names = names[:num_drawn]
    scale = max(pixels_per_s(measured.timeline), MIN_WIDTH / end_s)
    svg = draw_svg(drawn.timeline, gaps=drawn.gaps, rank_names=names, scale=scale, end_s=end_s, show=format_seconds)
    box = tag("div", Markup(svg), class_="timelines", tabindex="0", role="region", aria_label=f"{title}. {caption}")
    return figure_box(title, caption, NOTHING, box, is_wide=True)


def _measured_words(pipeline: dict[str, Any], measured: Timeline) -> tuple[str, str]:
    """(title, caption)"""
    schedule = measured.schedule
    step = number(pipeline.get("step"))
    title = f"{schedule.name}: step {step:.0f} as it ran" if step else f"{schedule.name} as it ran"
    replayed = number(table(pipeline, "bubble_share").get("replayed"))
    sentences = [
        f"{schedule.num_microbatches} micro-batches on {schedule.num_ranks} ranks in "
        f"{format_seconds(measured.makespan_s)}, bubble {measured.bubble_share:.1%}."
    ]
    if replayed:
        sentences.append(f"Of that {replayed:.1%} follow from the order and from the duration of each action.")
    if pipeline.get("is_disturbed"):
        sentences.append("An early step, slowed down by starting or measuring.")
    if pipeline.get("clock") != "one host":
        sentences.append("Clocks of several hosts were compared once.")
    return title, " ".join(sentences)


def _simulated_caption(simulated: Timeline) -> str:
    return (
        f"The schedule with the measured mean cost of each stage: {format_seconds(simulated.makespan_s)}, "
        f"bubble {simulated.bubble_share:.1%}."
    )


def _rank_table(pipeline: dict[str, Any], schedule: Schedule) -> Markup:
    shares = [_numbers(table(pipeline, side).get("bubble_share_by_rank")) for side in ("measured", "simulated")]
    spent = pipeline.get("gaps_s")
    sizes, ranks = _numbers(pipeline.get("activation_bytes")), _ranks(pipeline, schedule)
    lines = []
    for place in range(schedule.num_ranks):
        gap_s = table(spent[place]) if isinstance(spent, list) and place < len(spent) else {}
        lines.append(
            [
                text(ranks[place]),
                text(", ".join(map(str, schedule.rank_to_stages[place]))),
                *(shown(_at(values, place), "{:.1%}".format) for values in shares),
                *(shown(gap_s.get(kind), format_seconds) for kind in ("idle", "receive", "send")),
                shown(_at(sizes, place), format_bytes),
            ]
        )
    columns = ("rank", "stages", "bubble", "simulated", "idle", "receive", "send", "activations at peak")
    return grid(lines, columns=columns, caption="Where each rank's time went", numeric=range(2, len(columns)))


def _stage_table(pipeline: dict[str, Any], schedule: Schedule) -> Markup:
    held = [_numbers(table(pipeline, "in_flight").get(side)) for side in ("measured", "scheduled")]
    costs = [
        _numbers(table(pipeline, "costs").get(name)) for name in ("forward_s", "backward_input_s", "backward_weight_s")
    ]
    is_split = any(costs[2])
    lines = [
        [
            text(stage),
            *(shown(_at(counts, stage), "{:.0f}".format) for counts in held),
            *(shown(_at(seconds, stage), format_seconds) for seconds in (costs if is_split else costs[:2])),
        ]
        for stage in range(schedule.num_stages)
    ]
    backward = ("backward input", "backward weight") if is_split else ("backward",)
    columns = ("stage", "in flight at most", "by the schedule", "forward", *backward)
    caption = "Micro-batches in flight per stage, and the time of one"
    return grid(lines, columns=columns, caption=caption, numeric=range(1, len(columns)))


def _matrix(rows: Any, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
    found = tuple(tuple(float(value) for value in row) for row in rows)
    if [len(row) for row in found] != [len(actions) for actions in schedule.ranks]:
        raise ValueError("the times do not match the schedule")
    return found


def _ranks(pipeline: dict[str, Any], schedule: Schedule) -> Sequence[int]:
    """The global rank of each pipeline rank."""
    recorded = [int(rank) for rank in _numbers(pipeline.get("ranks")) if rank is not None]
    return recorded if len(recorded) == schedule.num_ranks else range(schedule.num_ranks)


def _numbers(values: Any) -> list[float | None]:
    return [number(value) for value in values] if isinstance(values, list) else []


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None
