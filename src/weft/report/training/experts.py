"""The charts of a mixture of experts: the busiest expert, dropped choices, and the load of every expert by step.

Load is an expert's tokens over the mean of its layer: 1 is balanced, 0 is an expert without a token.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from weft.core.records import ExpertLoads, StepRecord
from weft.report.chart import Chart, add_line, axis, curve_chart, label, new_figure, points_of
from weft.report.folder import TrainingFolder
from weft.report.palette import light
from weft.report.series import thin

MAX_ROWS, MAX_COLUMNS = 320, 160  # of the heat map
TOP_LOAD = 3.0  # the darkest colour


def draw_experts(folder: TrainingFolder) -> list[Chart]:
    """Charts of the recorded loads; none for a dense model."""
    charts = [
        draw_load(folder.metrics.steps),
        draw_drops(folder.metrics.steps, folder.experts),
        draw_heat_map(folder.experts),
    ]
    return [chart for chart in charts if chart is not None]


def draw_load(steps: Sequence[StepRecord]) -> Chart | None:
    points, worst = points_of(steps, "expert_load"), points_of(steps, "expert_load_max")
    if not points:
        return None
    dead = next((step.dead_experts for step in reversed(steps) if step.dead_experts is not None), 0)
    chart = curve_chart(
        steps,
        points,
        key="expert-load",
        title="Busiest expert",
        unit="tokens over the layer's mean",
        colour="blue",
        caption=f"Mean over the layers: {points[0][1]:.2f} at first, {points[-1][1]:.2f} at the end; "
        f"the fainter line is the worst layer. Experts without a token in the last step: {dead:,.0f}.",
        y_axis={"rangemode": "tozero"},
    )
    add_line(chart.figure, thin(worst), name="worst layer", colour="orange", opacity=0.5, width=1.2)
    return chart


def draw_drops(steps: Sequence[StepRecord], records: Sequence[ExpertLoads]) -> Chart | None:
    """Choices over the capacity of their expert; None without router.capacity_factor."""
    points = points_of(steps, "dropped_share")
    if not points:
        return None
    counts = next((record.dropped for record in reversed(records) if record.dropped), ())
    last = f" The last recorded step dropped {sum(counts):,} choices in {len(counts)} layers." if counts else ""
    return curve_chart(
        steps,
        points,
        key="expert-drops",
        title="Dropped choices",
        unit="share of all choices of experts",
        colour="orange",
        caption="Choices over the capacity of their expert (router.capacity_factor), mean over the layers: "
        f"{points[0][1]:.2%} at first, {points[-1][1]:.2%} at the end.{last}",
        y_axis={"rangemode": "tozero"},
    )


def draw_heat_map(records: Sequence[ExpertLoads]) -> Chart | None:
    """One row per expert, the layers below each other; layers beyond the limit of rows are left out, balanced first."""
    if not records:
        return None
    shown = _sampled([record for record in records if record.layers == records[-1].layers])
    tables = [record.by_layer() for record in shown]
    layers = _chosen(tables[-1])
    rows = [[table[name][expert] for table in tables] for name in layers for expert in range(len(tables[-1][name]))]
    names = [f"{_short(name)} expert {expert}" for name in layers for expert in range(len(tables[-1][name]))]
    begins = list(itertools.accumulate((len(tables[-1][name]) for name in layers), initial=0))[:-1]
    figure = new_figure(
        height=max(220, min(900, 90 + 4 * len(rows))),
        xaxis=axis("step", showgrid=False, type="category", nticks=12),
        yaxis=axis(
            "", showgrid=False, autorange="reversed", tickvals=begins, ticktext=[label(_short(name)) for name in layers]
        ),
    )
    figure.add(
        "heatmap",
        x=[str(record.step) for record in shown],
        y=list(range(len(rows))),
        z=rows,
        customdata=[[name] * len(shown) for name in map(label, names)],
        hovertemplate="step %{x}, %{customdata}: %{z:.2f} x the mean<extra></extra>",
        zmin=0.0,
        zmid=1.0,
        zmax=TOP_LOAD,
        colorscale=[[0.0, light("blue")], [1 / TOP_LOAD, light("card")], [1.0, light("bad")]],
        colorbar={"thickness": 12, "outlinewidth": 0, "title": {"text": "load"}},
    )
    left_out = len(tables[-1]) - len(layers)
    caption = "Each row is an expert. White is the mean of its layer, blue is less, red is more."
    caption += f" {left_out} more balanced layers are left out." if left_out else ""
    return Chart(key="expert-loads", title="Load of experts by step", caption=caption, figure=figure, is_wide=True)


def _sampled(records: Sequence[ExpertLoads]) -> list[ExpertLoads]:
    """At most MAX_COLUMNS records, first and last among them."""
    if len(records) <= MAX_COLUMNS:
        return list(records)
    last = len(records) - 1
    return [records[round(place * last / (MAX_COLUMNS - 1))] for place in range(MAX_COLUMNS)]


def _chosen(last: dict[str, list[float]]) -> list[str]:
    """Layers in the model's order: those with the busiest experts, as many as there is room for, at least one."""
    kept: set[str] = set()
    room = MAX_ROWS
    for name in sorted(last, key=lambda name: -max(last[name])):
        if not kept or len(last[name]) <= room:
            kept.add(name)
            room -= len(last[name])
    return [name for name in last if name in kept]


def _short(name: str) -> str:
    number = re.search(r"\d+", name)
    return f"layer {number.group()}" if number else name
