"""The curves of runs on parameter servers: one run over steps, several beside each other over steps and over seconds.

Seconds are those of training: evaluations and snapshots are left out. The comparison that counts between modes is the
one over seconds; over steps a mode that never waits looks no better than one that always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from weft.core.units import format_seconds
from weft.report.chart import Chart, Entry, add_line, axis, label, new_figure, step_figure
from weft.report.curves import draw_loss, draw_throughput, points_of, wants_log
from weft.report.palette import series_colour
from weft.report.series import Points, smooth, smooth_width, thin
from weft.report.server_folder import ServerRunFolder, ServerStep, train_seconds


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is compared: a field of a step, its words, and which end of it is the better one."""

    field: str
    key: str
    title: str
    axis_title: str
    is_better_high: bool = False
    is_smoothed: bool = False

    def best(self, values: Sequence[float]) -> float:
        return max(values) if self.is_better_high else min(values)

    def worst(self, values: Sequence[float]) -> float:
        return min(values) if self.is_better_high else max(values)


QUANTITIES = (
    Quantity(field="loss", key="loss", title="Training loss", axis_title="loss", is_smoothed=True),
    Quantity(field="eval_loss", key="held-out", title="Held-out loss", axis_title="held-out loss"),
    Quantity(field="auc", key="auc", title="AUC", axis_title="AUC", is_better_high=True),
)


def draw_server_curves(folder: ServerRunFolder) -> list[Chart]:
    """Every curve of one run that has something to show, the loss first."""
    steps = folder.metrics.steps
    charts = [
        draw_loss(steps, resumed=folder.metrics.resumed_after, over="samples"),
        draw_auc(steps),
        draw_throughput(steps, of="samples", by="workers"),
        draw_staleness(steps),
        draw_waiting(steps),
    ]
    return [chart for chart in charts if chart is not None]


def draw_auc(steps: Sequence[ServerStep]) -> Chart | None:
    points = points_of(steps, "auc")
    if not points:
        return None
    figure = step_figure(steps, title="AUC")
    add_line(figure, points, name="AUC", colour="orange", mode="lines+markers", line={"dash": "dot"})
    step, best = max(points, key=lambda point: point[1])
    caption = f"Of held-out samples: last {points[-1][1]:.4f}, best {best:.4f} at step {step:,.0f}."
    return Chart(key="auc", title="AUC", caption=caption, figure=figure)


def draw_staleness(steps: Sequence[ServerStep]) -> Chart | None:
    """Nothing where every gradient was fresh: a flat zero says less than the histogram."""
    points = points_of(steps, "staleness_mean")
    if not any(y for _, y in points):
        return None
    figure = step_figure(steps, title="staleness (units)", rangemode="tozero")
    add_line(figure, thin(points), name="staleness", colour="purple", width=1.4)
    step, top = max(points, key=lambda point: point[1])
    caption = f"Units applied between a pull and its push, mean of a step; largest {top:.3g} at step {step:,.0f}."
    return Chart(key="staleness-steps", title="Staleness", caption=caption, figure=figure)


def draw_waiting(steps: Sequence[ServerStep]) -> Chart | None:
    points = points_of(steps, "wait_s")
    if not any(y for _, y in points):
        return None
    is_log = wants_log([y for _, y in points])  # the first step waits for processes to warm up
    scale = {"type": "log", "dtick": 1} if is_log else {"rangemode": "tozero"}
    figure = step_figure(steps, title="seconds a unit", **scale)
    add_line(figure, thin(points), name="waiting", colour="rose", width=1.4)
    step, top = max(points, key=lambda point: point[1])
    caption = f"For work, rows and acknowledgements; longest {format_seconds(top)} at step {step:,.0f}."
    caption += " Log scale." if is_log else ""
    return Chart(key="waiting", title="Waiting of a worker", caption=caption, figure=figure)


def draw_beside(names: Sequence[str], folders: Sequence[ServerRunFolder]) -> list[list[Chart]]:
    """For each quantity that is known a pair: over steps, over seconds."""
    runs = [folder.metrics.steps for folder in folders]
    pairs = [[_over_steps(quantity, names, runs), _over_seconds(quantity, names, runs)] for quantity in QUANTITIES]
    found = [[chart for chart in pair if chart is not None] for pair in pairs]
    return [pair for pair in found if pair]


def _over_steps(quantity: Quantity, names: Sequence[str], runs: Sequence[Sequence[ServerStep]]) -> Chart | None:
    curves = [_fit(quantity, points_of(steps, quantity.field)) for steps in runs]
    longest = max(runs, key=len)
    caption = _last_values(names, curves)
    return _beside_chart(quantity, names, curves, step_figure(longest, title=quantity.axis_title), "steps", caption)


def _over_seconds(quantity: Quantity, names: Sequence[str], runs: Sequence[Sequence[ServerStep]]) -> Chart | None:
    curves = [_fit(quantity, _timed(steps, quantity.field)) for steps in runs]
    x_axis = axis("seconds of training", showgrid=False, rangemode="tozero")
    figure = new_figure(hovermode="x unified", xaxis=x_axis, yaxis=axis(quantity.axis_title))
    caption = "" if quantity.is_smoothed else _soonest(quantity, names, curves)
    untimed = [name for name, steps in zip(names, runs, strict=True) if steps and train_seconds(steps) is None]
    caption += f" Without times, and so not drawn: {', '.join(untimed)}." if untimed else ""
    return _beside_chart(quantity, names, curves, figure, "seconds", caption.strip())


def _beside_chart(
    quantity: Quantity, names: Sequence[str], curves: Sequence[Points], figure: go.Figure, over: str, caption: str
) -> Chart | None:
    if not any(curves):
        return None
    legend = []
    for index, (name, points) in enumerate(zip(names, curves, strict=True)):
        dots = {} if quantity.is_smoothed else {"mode": "lines+markers"}
        if points:
            add_line(figure, thin(points), name=label(name), colour=series_colour(index), **dots)
            legend.append(Entry(words=name, colour=series_colour(index)))
    if quantity.is_smoothed:
        caption = f"Smoothed. {caption}".strip()
    key, title = f"beside-{quantity.key}-{over}", f"{quantity.title} over {over}"
    return Chart(key=key, title=title, caption=caption, figure=figure, legend=tuple(legend))


def _fit(quantity: Quantity, points: Points) -> Points:
    """Smoothed, without the ends where the window is cut: one noisy step there would decide who looks better."""
    width = smooth_width(len(points)) if quantity.is_smoothed else 0
    return smooth(points, width=width)[width:-width] if width else points


def _timed(steps: Sequence[ServerStep], field: str) -> Points:
    clock = dict(zip((step.step for step in steps), train_seconds(steps) or (), strict=False))
    return [(clock[int(x)], y) for x, y in points_of(steps, field) if int(x) in clock]


def _last_values(names: Sequence[str], curves: Sequence[Points]) -> str:
    lasts = [f"{name} {points[-1][1]:.4f}" for name, points in zip(names, curves, strict=True) if points]
    return f"Last: {', '.join(lasts)}."


def _soonest(quantity: Quantity, names: Sequence[str], curves: Sequence[Points]) -> str:
    """When each run first reached what all of them reached."""
    drawn = [(name, points) for name, points in zip(names, curves, strict=True) if points]
    if len(drawn) < 2:
        return ""
    goal = quantity.worst([quantity.best([y for _, y in points]) for _, points in drawn])
    times = [(next(x for x, y in points if quantity.best([y, goal]) == y), name) for name, points in drawn]
    told = ", ".join(f"{name} after {format_seconds(seconds)}" for seconds, name in sorted(times))
    return f"{goal:.4f} was reached by {told}."
