"""The pipeline of a run as it was: the measured timeline, the simulated one below it on the same scale, and the counts.

The simulated one has the measured mean cost of each stage, so what differs is not work but waiting. A row a rank:

    forward | backward, or its two halves | receive: a message is on its way | send: one is handed over | idle
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from weft.core.errors import InputError
from weft.core.units import format_bytes, format_seconds
from weft.report.chart import Chart, Entry, axis, label, new_figure
from weft.report.folder import number, table
from weft.report.markup import ABSENT, Markup, grid, join, tag, text
from weft.report.palette import light
from weft.schedule import Kind, Schedule, Timeline, gaps
from weft.schedule.draw import chunk_of, label_of

MAX_BARS = 12_000
MAX_LABELS = 600  # more would be unreadable, and slow to draw
COLOURS = {
    "forward": "blue",
    "backward": "orange",
    "backward input": "teal",
    "backward weight": "purple",
    "update": "rose",
    "receive": "gold",
    "send": "sky",
    "idle": "line",
}
_WORDS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward input", Kind.W: "backward weight", Kind.U: "update"}


class Bar(NamedTuple):
    """A stretch of a rank's time."""

    rank: int
    what: str
    start_s: float
    end_s: float
    label: str = ""
    told: str = ""
    is_later_stage: bool = False


class Ran(NamedTuple):
    """A timeline and when its ranks turned to their actions."""

    timeline: Timeline
    asked: Sequence[Sequence[float]]


def draw_pipeline(pipeline: dict[str, Any]) -> list[Chart]:
    """Measured and simulated; none where the file does not hold them."""
    measured, simulated = read_run(pipeline, "measured"), read_run(pipeline, "simulated")
    if measured is None or simulated is None:
        return []
    end_s = max(measured.timeline.makespan_s, simulated.timeline.makespan_s)
    ranks = [f"rank {rank}" for rank in _ranks(pipeline, measured.timeline.schedule)]
    words = _Words(pipeline, measured.timeline, simulated.timeline)
    return [
        _chart("pipeline-measured", words.measured_title, words.measured_caption, measured, ranks, end_s),
        _chart("pipeline-simulated", "The same, simulated", words.simulated_caption, simulated, ranks, end_s),
    ]


def read_run(pipeline: dict[str, Any], side: str) -> Ran | None:
    """One of the two timelines; None where it is not one of the schedule's."""
    times = table(pipeline, side)
    try:
        schedule = Schedule.parse(str(pipeline.get("order", "")))
        starts, ends = _matrix(times["starts"], schedule), _matrix(times["ends"], schedule)
        asked = _matrix(times["asked"], schedule) if "asked" in times else _asked_at_once(starts, ends)
    except (InputError, KeyError, TypeError, ValueError):
        return None
    timeline = Timeline(schedule=schedule, starts=starts, ends=ends)
    return Ran(timeline, asked) if timeline.makespan_s > 0 else None


def bars_of(ran: Ran) -> Iterator[Bar]:
    """Every stretch of every rank, from 0 on."""
    timeline, asked = ran
    schedule, origin_s = timeline.schedule, timeline.origin_s
    for rank, action, start_s, end_s in timeline.events():
        told = f"{action}: stage {action.stage}, micro-batch {action.microbatch}"
        is_later = chunk_of(schedule, action) > 0
        name = label_of(schedule, action)[1:]
        yield Bar(rank, _WORDS[action.kind], start_s - origin_s, end_s - origin_s, name, told, is_later)
    for rank, kind, start_s, end_s in gaps(timeline, asked):
        yield Bar(rank, str(kind), start_s - origin_s, end_s - origin_s, told=str(kind))


def pipeline_tables(pipeline: dict[str, Any]) -> Markup:
    """By rank: where its time went. By stage: what it held."""
    schedule = Schedule.parse(str(pipeline["order"]))
    note = (
        "Bubble is the share of a rank's time in which it did not compute, between the pipeline's first action and its "
        "last. pipeline_trace.json holds both timelines for ui.perfetto.dev."
    )
    return join(
        [tag("p", text(note), class_="muted"), _rank_table(pipeline, schedule), _stage_table(pipeline, schedule)]
    )


class _Words:
    """What the two charts say."""

    def __init__(self, pipeline: dict[str, Any], measured: Timeline, simulated: Timeline) -> None:
        schedule = measured.schedule
        step = number(pipeline.get("step"))
        self.measured_title = f"{schedule.name}: step {step:.0f} as it ran" if step else f"{schedule.name} as it ran"
        slowed = " An early step, slowed down by starting or measuring." if pipeline.get("is_disturbed") else ""
        shifted = " Clocks of several hosts were compared once." if pipeline.get("clock") != "one host" else ""
        replayed = number(table(pipeline, "bubble_share").get("replayed"))
        kept = f" Of that {replayed:.1%} follow from the order and from how long each action took." if replayed else ""
        self.measured_caption = (
            f"{schedule.num_microbatches} micro-batches on {schedule.num_ranks} ranks in "
            f"{format_seconds(measured.makespan_s)}, bubble {measured.bubble_share:.1%}.{kept}{slowed}{shifted}"
        )
        self.simulated_caption = (
            f"The schedule with the measured mean cost of each stage: {format_seconds(simulated.makespan_s)}, "
            f"bubble {simulated.bubble_share:.1%}."
        )


def _chart(key: str, title: str, caption: str, ran: Ran, ranks: Sequence[str], end_s: float) -> Chart:
    bars = list(bars_of(ran))
    if len(bars) > MAX_BARS:
        num_shown = max(1, len(ranks) * MAX_BARS // len(bars))
        bars = [bar for bar in bars if bar.rank < num_shown]
        caption += f" The first {num_shown} of {len(ranks)} ranks are drawn."
    present = [what for what in COLOURS if any(bar.what == what for bar in bars)]
    return Chart(
        key=key,
        title=title,
        caption=caption,
        figure=_figure(bars, ranks, end_s),
        legend=tuple(Entry(words=what, colour=COLOURS[what], drawn="bar") for what in present),
        is_wide=True,
    )


def _figure(bars: Sequence[Bar], ranks: Sequence[str], end_s: float) -> go.Figure:
    unit, scale = ("s", 1.0) if end_s >= 1 else ("ms", 1e-3)
    num_ranks = 1 + max(bar.rank for bar in bars)
    figure = new_figure(
        height=80 + 34 * num_ranks,
        barmode="overlay",
        bargap=0.18,
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis=axis(unit, range=[0, end_s / scale], showgrid=False),
        yaxis=axis("", showgrid=False, type="category", autorange="reversed", nticks=num_ranks),
    )
    has_labels = len(bars) <= MAX_LABELS
    by_kind: dict[str, list[Bar]] = defaultdict(list)
    for bar in bars:
        by_kind[bar.what].append(bar)
    for what in (what for what in COLOURS if what in by_kind):
        _add(figure, what, by_kind[what], ranks, scale=scale, has_labels=has_labels)
    return figure


def _add(
    figure: go.Figure, what: str, bars: Sequence[Bar], ranks: Sequence[str], *, scale: float, has_labels: bool
) -> None:
    """Later stages of a rank are paler."""
    figure.add_bar(
        x=[round((bar.end_s - bar.start_s) / scale, 4) for bar in bars],
        base=[round(bar.start_s / scale, 4) for bar in bars],
        y=[label(ranks[bar.rank]) for bar in bars],
        orientation="h",
        name=what,
        text=[bar.label for bar in bars] if has_labels else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        customdata=[f"{bar.told}, {format_seconds(bar.end_s - bar.start_s)}" for bar in bars],
        hovertemplate="%{customdata}<extra></extra>",
        marker={
            "color": light(COLOURS[what]),
            "opacity": [0.65 if bar.is_later_stage else 1.0 for bar in bars],
            "line": {"width": 0.5 if what != "idle" else 0, "color": light("card")},
        },
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
                *(_cell(_at(values, place), "{:.1%}".format) for values in shares),
                *(_cell(number(gap_s.get(kind)), format_seconds) for kind in ("idle", "receive", "send")),
                _cell(_at(sizes, place), format_bytes),
            ]
        )
    columns = ("rank", "stages", "bubble", "simulated", "idle", "receive", "send", "activations at peak")
    return grid(lines, columns=columns, caption="Where each rank's time went", numeric=range(2, len(columns)))


def _stage_table(pipeline: dict[str, Any], schedule: Schedule) -> Markup:
    held = [_numbers(table(pipeline, "in_flight").get(side)) for side in ("measured", "scheduled")]
    costs = [
        _numbers(table(pipeline, "costs").get(name)) for name in ("forward_s", "backward_input_s", "backward_weight_s")
    ]
    is_cut = any(costs[2])
    lines = [
        [
            text(stage),
            *(_cell(_at(counts, stage), "{:.0f}".format) for counts in held),
            *(_cell(_at(seconds, stage), format_seconds) for seconds in (costs if is_cut else costs[:2])),
        ]
        for stage in range(schedule.num_stages)
    ]
    backward = ("backward input", "backward weight") if is_cut else ("backward",)
    columns = ("stage", "held at most", "by the schedule", "forward", *backward)
    caption = "Micro-batches that a stage held, and what one costs"
    return grid(lines, columns=columns, caption=caption, numeric=range(1, len(columns)))


def _matrix(rows: Any, schedule: Schedule) -> tuple[tuple[float, ...], ...]:
    found = tuple(tuple(float(value) for value in row) for row in rows)
    if [len(row) for row in found] != [len(actions) for actions in schedule.ranks]:
        raise ValueError("not the times of this schedule")
    return found


def _asked_at_once(starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    """A simulated rank turns to its next action as soon as it is done with one."""
    return tuple((0.0, *own[:-1]) for _, own in zip(starts, ends, strict=True))


def _ranks(pipeline: dict[str, Any], schedule: Schedule) -> Sequence[int]:
    """The global rank of each place."""
    told = [int(rank) for rank in _numbers(pipeline.get("ranks")) if rank is not None]
    return told if len(told) == schedule.num_ranks else range(schedule.num_ranks)


def _numbers(values: Any) -> list[float | None]:
    return [number(value) for value in values] if isinstance(values, list) else []


def _at(values: Sequence[float | None], index: int) -> float | None:
    return values[index] if index < len(values) else None


def _cell(value: float | None, show: Callable[[float], str]) -> Markup:
    return ABSENT if value is None else text(show(value))
